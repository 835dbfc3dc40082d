"""Apple's Neural Engine: an ML Program made by coremltools, for iOS 17 and macOS 14 on."""

import contextlib
import io
import logging
import platform
import tempfile
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor, nn

from attnrewrite.errors import AttnRewriteError, CheckFailedError, InputError
from attnrewrite.targets import check, mil_interpreter
from attnrewrite.targets.base import Artifact, Availability, Run, Target, size_bytes
from attnrewrite.targets.prepare import arrays, canonical, first_line, reference, specialise


class CoreMLNpu(Target):
    """A float16 `.mlpackage`, checked operator by operator with every result rounded as the program declares it."""

    name = "coreml-npu"
    summary = "Apple's Neural Engine: Core ML ML Program (iOS 17, macOS 14), float16"

    def availability(self) -> Availability:
        missing = (
            None if find_spec("coremltools") else "coremltools is not installed (pip install 'attnrewrite[coreml]')"
        )
        elsewhere = None if platform.system() == "Darwin" else "Core ML predicts on a Mac or an iPhone only"
        return Availability(build=missing, measure=missing or elsewhere)

    def lower(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], out: Path, *, threads: int
    ) -> Artifact:
        self.require_build()
        package = _convert(module, example_inputs, out)
        agreement = _check(f"{name} for {self.name}", package, module, example_inputs)
        return self.artifact(
            name, out, agreement, check="MIL program interpreted with float16 rounding", schedule="Core ML's own"
        )

    def runs(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], *, threads: int
    ) -> tuple[Run, ...]:
        reason = self.availability().measure
        if reason is not None:
            return (Run("core ml", None, None, None, reason),)
        try:
            return (_predictor(f"{name} in Core ML", module, example_inputs),)
        except AttnRewriteError as error:
            return (Run("core ml", None, None, None, str(error)),)


def _convert(module: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> Path:
    """The module as a float16 package in `folder`."""
    program = canonical(specialise(module, inputs))
    package = folder / "model.mlpackage"
    try:
        with _quiet():
            import coremltools as ct

            ct.convert(
                program,
                convert_to="mlprogram",
                minimum_deployment_target=ct.target.iOS17,
                compute_precision=ct.precision.FLOAT16,
                compute_units=ct.ComputeUnit.CPU_AND_NE,
                skip_model_load=True,
            ).save(str(package))
    except Exception as error:
        raise InputError(f"coremltools cannot convert the module: {first_line(error)}") from error
    return package


def _check(subject: str, package: Path, module: nn.Module, inputs: tuple[Tensor, ...]) -> check.Agreement:
    with _quiet():
        program = mil_interpreter.load(package)
    names = program.functions["main"].inputs
    result = mil_interpreter.interpret(program, dict(zip(names, inputs, strict=True)))
    try:
        return check.agree(subject, arrays(tuple(result.outputs.values())), reference(module, inputs), check.FLOAT16)
    except CheckFailedError as error:
        if not result.overflowed:
            raise
        raise CheckFailedError(f"{error}; float16 overflows first in {result.overflowed[0]!r}") from error


def _predictor(subject: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> Run:
    """The package loaded by Core ML itself. On a Mac only."""
    import coremltools as ct

    with tempfile.TemporaryDirectory() as folder:
        package = _convert(module, inputs, Path(folder))
        size = size_bytes(package)
        model = ct.models.MLModel(str(package), compute_units=ct.ComputeUnit.CPU_AND_NE)
    spec = model.get_spec().description
    feed = dict(zip([given.name for given in spec.input], arrays(inputs), strict=True))
    predicted = model.predict(feed)
    found = [predicted[output.name] for output in spec.output]
    agreement = check.agree(subject, found, reference(module, inputs), check.FLOAT16)
    return Run("core ml", lambda: model.predict(feed), agreement.max_abs_error, size, None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps coremltools' progress bars and remarks on versions from the terminal; errors still come as exceptions."""
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
