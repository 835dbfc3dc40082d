"""A model's weights as a part of its library that is mapped and never copied: compiled by a C++ compiler."""

import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from attnrewrite.errors import InputError
from attnrewrite.targets.runners.programs import Unavailable, run
from attnrewrite.targets.tvm.schedules.weights import KINDS

ALIGNMENT = 64  # bytes: what kernels may rely on
COMPILE_S = 120  # seconds
# Read-only data by name, for assemblers of ELF.
BYTES = (
    r'__asm__(".section .rodata\n.hidden {name}\n.globl {name}\n.balign {alignment}\n{name}:\n'
    r'.incbin \"{file}\"\n.text\n");'
)


def compiled(weights: Sequence[np.ndarray], compiler: str, headers: Sequence[str], path: Path) -> Path:
    """The object file `path` with `weights` and the function that gives them, by the C++ compiler `compiler`.

    Raises:
        InputError: the compiler fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows, at = [], 0
        with open(f"{folder}/weights.bin", "wb") as data:
            for array in weights:
                at = data.seek(-(-at // ALIGNMENT) * ALIGNMENT)
                rows.append(_row(array, at))
                at += data.write(np.ascontiguousarray(array).data)
        told = BYTES.format(name="attnrewrite_bytes", alignment=ALIGNMENT, file=f"{folder}/weights.bin")
        table = ["static const weight weights[] = {", *rows, "};", told]
        Path(f"{folder}/weights.h").write_text("\n".join(table))
        source = Path(f"{folder}/weights.cc")
        source.write_bytes(files("attnrewrite.targets.tvm").joinpath("library_weights.cc").read_bytes())
        includes = [f"-I{header}" for header in headers]
        try:
            run([compiler, "-std=c++17", "-O2", "-fPIC", "-c", str(source), *includes, "-o", str(path)], COMPILE_S)
        except Unavailable as error:
            raise InputError(f"the weights cannot be made part of the library: {error}") from error
    return path


def _row(array: np.ndarray, offset: int) -> str:
    bits, shape = 8 * array.dtype.itemsize, ", ".join(map(str, array.shape))
    return f"{{{offset}, {array.ndim}, {{{KINDS[array.dtype.kind]}, {bits}, 1}}, {{{shape}}}}},"
