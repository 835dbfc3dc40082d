"""Core ML packages: made of an exported program by coremltools, read back as MIL programs, loaded on a Mac."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from attnrewrite.errors import InputError, first_line
from attnrewrite.targets.coreml.pipeline import pipeline


def convert(program: ExportedProgram, folder: Path, precision: str, layout: str = "engine") -> Path:
    """The program as a package in `folder`, computing in `precision` (FLOAT16 or FLOAT32), laid out as `pipeline` says.

    Raises:
        InputError: coremltools cannot convert it; there is no such layout.
    """
    package = folder / "model.mlpackage"
    edited = pipeline(layout)
    try:
        with quiet():
            import coremltools as ct

            ct.convert(
                program,
                convert_to="mlprogram",
                minimum_deployment_target=ct.target.iOS17,
                compute_precision=ct.precision[precision],
                compute_units=ct.ComputeUnit.CPU_AND_NE,
                pass_pipeline=edited,
                skip_model_load=True,
            ).save(str(package))
    except Exception as error:
        raise InputError(f"coremltools cannot convert the module: {first_line(error)}") from error
    return package


def loaded(package: Path) -> Any:
    """The package as Core ML compiles it for this Mac."""
    import coremltools as ct

    return ct.models.MLModel(str(package), compute_units=ct.ComputeUnit.CPU_AND_NE)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps coremltools' progress bars and remarks on versions from the terminal; errors still come as exceptions."""
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
