"""Core ML packages: made of an exported program by coremltools, read back as MIL programs, loaded on a Mac."""

import contextlib
import io
import logging
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from attnrewrite.errors import InputError, first_line
from attnrewrite.targets.coreml import spelling
from attnrewrite.targets.coreml.pipeline import pipeline

NAME = "model.mlpackage"


def convert(
    program: ExportedProgram, folder: Path, precision: str, layout: str = "engine", wide: Collection[str] = ()
) -> Path:
    """The program as a package in `folder`, computing in `precision` (FLOAT16 or FLOAT32), laid out as `pipeline` says.

    The operators named `wide` compute in float32 all the same.

    An operator that coremltools cannot translate is written out in others, where torch knows how.

    Raises:
        InputError: coremltools cannot convert it, and the operator is named; there is no such layout.
    """
    package = folder / NAME
    with quiet():
        program = spelling.readable(program)
    tried: set[object] = set()
    while True:
        edited = pipeline(layout)
        try:
            with quiet():
                _converted(program, precision, edited, frozenset(wide)).save(str(package))
            return package
        except Exception as error:
            node = spelling.culprit(error, program)
            simpler = None if node is None or node.target in tried else spelling.written_out(program, [node.target])
            if simpler is None:
                subject = "the module" if node is None else spelling.told(node)
                raise InputError(f"coremltools cannot convert {subject}: {first_line(error)}") from error
            assert node is not None
            tried.add(node.target)
            program = simpler


def _converted(program: ExportedProgram, precision: str, edited: Any, wide: Collection[str]) -> Any:
    import coremltools as ct

    halves = ct.transform.FP16ComputePrecision(op_selector=lambda operation: operation.name not in wide)
    return ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.iOS17,
        compute_precision=halves if precision == "FLOAT16" else ct.precision[precision],
        compute_units=ct.ComputeUnit.CPU_AND_NE,
        pass_pipeline=edited,
        skip_model_load=True,
    )


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
