"""Core ML packages: made of an exported program by coremltools, read back as MIL programs, loaded on a Mac."""

import contextlib
import errno
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from attnrewrite.errors import InputError, first_line, unknown_name
from attnrewrite.targets.coreml import spelling
from attnrewrite.targets.coreml.pipeline import LAYOUTS, coreml_pipeline
from attnrewrite.targets.limits import described
from attnrewrite.targets.pictures import COLORS
from attnrewrite.targets.record import Labels

NAME = "model.mlpackage"
UNWRITTEN = "[MIL FileWriter]"  # in what coremltools says where a disk is full
MINIMUMS = ("iOS17", "iOS18")  # the oldest systems that a package may be made for


@dataclass(frozen=True)
class Wanted:
    """How a package is made. `layout` as in `coreml_pipeline`; `minimum` is of MINIMUMS; `about` is its description.

    `image`: its input is an image of 8 bits a channel, which the program reads as [1, C, H, W] in 0..255. With `labels`
    it answers with a name and a dictionary; a softmax that they ask for is the program's last operator. `settled`: what
    coremltools merges as it compresses weights is merged already, so that nothing but weights changes then.
    """

    layout: str = "engine"
    minimum: str = "iOS17"
    about: str = ""
    image: bool = False
    labels: Labels | None = None
    settled: bool = False

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise unknown_name("layout", self.layout, LAYOUTS)
        if self.minimum not in MINIMUMS:
            raise unknown_name("minimum target", self.minimum, MINIMUMS)


DEFAULT = Wanted()


def convert(
    program: ExportedProgram, folder: Path, precision: str, wanted: Wanted = DEFAULT, wide: Collection[str] = ()
) -> Path:
    """The program as a package in `folder`, computing in `precision` (FLOAT16 or FLOAT32), as `wanted`.

    The operators named `wide` compute in float32 all the same.

    An operator that coremltools cannot translate is written out in others, where torch knows how.

    Raises:
        InputError: coremltools cannot convert it, and the operator is named.
    """
    package = folder / NAME
    with quiet():
        program = spelling.readable(program)
    tried: set[object] = set()
    while True:
        edited = coreml_pipeline(wanted.layout)
        try:
            with quiet():
                model = _converted(program, precision, wanted, edited, frozenset(wide))
                model = _settled(model) if wanted.settled else model
                _describe(model, wanted)
                model.save(str(package))
            return package
        except Exception as error:
            require_written(error, folder)
            if (why := spelling.high_rank(error, program)) is not None:
                raise InputError(f"{why}: join axes in the model, or take the operator out of it") from error
            node = spelling.culprit(error, program)
            with quiet():
                simpler = None if node is None or node.target in tried else spelling.without(program, node)
            if simpler is None:
                subject = "the module" if node is None else described(node)
                raise InputError(f"coremltools cannot convert {subject}: {first_line(error)}") from error
            assert node is not None
            tried.add(node.target)
            program = simpler


def require_written(error: Exception, folder: Path) -> None:
    """Raise InputError where `error`, met on the way to a package in `folder`, is that a disk is full."""
    full, temporary = os.strerror(errno.ENOSPC), Path(tempfile.gettempdir())
    if UNWRITTEN in str(error) or (full in str(error) and folder.parent == temporary):
        raise InputError(
            f"coremltools cannot write in {temporary}, where it keeps what it makes: make room, or set TMPDIR to a "
            "folder that has some"
        ) from error
    if full in str(error):
        raise InputError(f"cannot write {folder}: {full}") from error


def _settled(model: Any) -> Any:
    """The model after the passes that coremltools runs before it compresses, which here compress nothing."""
    from coremltools.optimize import coreml as optimize

    return optimize.linear_quantize_weights(model, optimize.OptimizationConfig(global_config=None))


def _describe(model: Any, wanted: Wanted) -> None:
    """What the package says of itself, where Xcode shows it."""
    version = metadata.version("attnrewrite")
    model.short_description = wanted.about
    model.user_defined_metadata["attnrewrite.version"] = version
    model.user_defined_metadata["attnrewrite.layout"] = wanted.layout


def _converted(program: ExportedProgram, precision: str, wanted: Wanted, edited: Any, wide: Collection[str]) -> Any:
    import coremltools as ct

    halves = ct.transform.FP16ComputePrecision(op_selector=lambda operation: operation.name not in wide)
    return ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=ct.target[wanted.minimum],
        compute_precision=halves if precision == "FLOAT16" else ct.precision[precision],
        compute_units=ct.ComputeUnit.CPU_AND_NE,
        pass_pipeline=edited,
        inputs=[_image(program)] if wanted.image else None,
        classifier_config=ct.ClassifierConfig(list(wanted.labels.names)) if wanted.labels else None,
        skip_model_load=True,
    )


def _image(program: ExportedProgram) -> Any:
    """The program's input as an image, gray or RGB by its channels."""
    import coremltools as ct

    (name,) = program.graph_signature.user_inputs
    shape = next(node.meta["val"].shape for node in program.graph.nodes if node.name == name)
    return ct.ImageType(name=name, shape=tuple(shape), color_layout=ct.colorlayout[COLORS[shape[1]]])


def loaded(package: Path) -> Any:
    """The package as Core ML compiles it for this Mac."""
    import coremltools as ct

    return ct.models.MLModel(str(package), compute_units=ct.ComputeUnit.CPU_AND_NE)


def unloaded(package: Path) -> Any:
    """The package as coremltools sends it to a device."""
    import coremltools as ct

    return ct.models.MLModel(str(package), compute_units=ct.ComputeUnit.CPU_AND_NE, skip_model_load=True)


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
