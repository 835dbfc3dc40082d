"""The C++ examples, built as README.md says."""

import shutil
from pathlib import Path

import pytest

from attnrewrite.targets.runners import programs
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
