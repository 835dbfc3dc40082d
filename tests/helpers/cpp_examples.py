"""The C++ examples, built as README.md says."""

import shutil
from pathlib import Path

import pytest

from attnrewrite.targets.runners import programs, qemu
from attnrewrite.targets.tvm import compat as tvm_compat

EXAMPLES = Path(__file__).parents[2] / "examples" / "cpp"


def linked(compiler: str, source: str, folder: Path, *libraries: Path) -> Path:
    """An example, linked with the runtime's libraries; the test is skipped without the compiler."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    program = folder / Path(source).stem
    includes = [f"-I{path}" for path in tvm_compat.runtime_packages().headers]
    options = ["-std=c++17", "-Wall", "-Wl,--no-as-needed", *includes]
    programs.run([compiler, *options, str(EXAMPLES / source), *map(str, libraries), "-o", str(program)], 120)
    return program


def arm_libraries(folder: Path) -> list[Path]:
    """The runtime's libraries for ARM, copied to a folder; the test is skipped where they cannot be had or run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNREWRITE_OFFLINE", "1")
        try:
            runtime = qemu.runtime(tvm_compat.runtime_packages())
        except programs.Unavailable as reason:
            pytest.skip(str(reason))
    return [shutil.copy(runtime / Path(name).name, folder) for name in qemu.LIBRARIES]
