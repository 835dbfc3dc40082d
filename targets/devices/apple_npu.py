"""Apple's Neural Engine: an ML Program made by coremltools, for iOS 17 and macOS 14 on."""

import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from attnrewrite.errors import AttnRewriteError, InputError, Refusal
from attnrewrite.targets import agreement as check
from attnrewrite.targets.base import Artifact, Availability, Estimate, Pricing, Run, Target, size_bytes
from attnrewrite.targets.coreml import compression, interpreter, latency, lowering, on_mac, package, saved
from attnrewrite.targets.coreml.labels import named, read_labels
from attnrewrite.targets.devices import on_phone
from attnrewrite.targets.prepare import arrays, canonical, each_once, in_float32, reference

NOT_MEASURED = Refusal(
    "needs-device", "Core ML predicts on a Mac only, or on an iPhone connected to one (--device NAME)"
)


@dataclass(frozen=True)
class CoreMLNpu(Target):
    """A float16 `.mlpackage`, checked operator by operator with every result rounded as the program declares it.

    `layout` is "engine", for the Neural Engine, or "as-is", the exporter's own; `minimum_target` is the oldest system
    that it is for. With `image_input`, its input is an image, with `labels` (names, or a file of one a line) it answers
    with the name of a class and the probability of each. `compress` is a method of `compression.METHODS`.

    `device` is the name of an iPhone (or another device of Apple's) connected to this Mac, to measure on; for it
    `development_team` signs coremltools' app, by its identifier, and a model may take `device_timeout` seconds.
    """

    layout: str = "engine"
    minimum_target: str = "iOS17"
    image_input: bool = False
    labels: str | Path | tuple[str, ...] | None = None
    compress: str | None = None
    device: str | None = None
    development_team: str | None = None
    device_timeout: float = on_phone.TIMEOUT_S

    name = "coreml-npu"
    summary = "Apple's Neural Engine: Core ML ML Program (iOS 17, macOS 14), float16"
    has_answers = True

    def availability(self) -> Availability:
        if find_spec("coremltools") is None:
            missing = Refusal("not-installed", "coremltools is not installed (pip install 'attnrewrite[coreml]')")
            return Availability(build=missing, measure=missing)
        elsewhere = self.device is None and platform.system() != "Darwin"
        return Availability(build=None, measure=NOT_MEASURED if elsewhere else None)

    def __post_init__(self) -> None:
        self._wanted("")
        self._phone()
        if self.labels is not None:
            read_labels(self.labels)
        refused = None if self.compress is None else compression.refusal(self.compress)
        if refused is not None:
            raise InputError(f"--compress {self.compress} {refused}")

    @property
    def takes_pictures(self) -> bool:
        return self.image_input

    def lower(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], out: Path, *, threads: int
    ) -> Artifact:
        self.require_build()
        wide = in_float32(module, example_inputs)
        inputs, notes = _as_core_ml_takes(wide.inputs)
        program, module, dropped = each_once(wide.module, inputs)
        expected = reference(module, wide.inputs)
        labels = None if self.labels is None else named(name, read_labels(self.labels), expected)
        wanted = replace(self._wanted(name), image=self.image_input, labels=labels)
        made = lowering.lower(f"{name} for {self.name}", program, inputs, expected, out, wanted, self.compress)
        how = f"MIL program interpreted with float16 rounding; in float32 it is within {made.float32.max_abs_error:.2g}"
        if made.compression is not None:
            how += " before it was compressed; then held to itself in float32, operator by operator the same program"
        return self.artifact(
            name,
            out,
            made.float16,
            check=how,
            schedule=f"Core ML's own, layout {self.layout}: {made.engine.sentence()}",
            notes=(*notes, *dropped, *wide.notes, *made.notes()),
            inputs=[array.astype(np.uint8) for array in arrays(inputs)] if self.image_input else arrays(inputs),
            outputs=expected,
            labels=labels,
            compression=made.compression,
        )

    def lay_out(self, package: Path, out: Path) -> Artifact:
        self.require_build()
        given = {"image-input": self.image_input, "labels": self.labels, "compress": self.compress}
        told = [name for name, value in given.items() if value]
        if told:
            raise InputError(f"a package keeps its inputs, outputs and weights as they lie: leave --{told[0]} out")
        made = saved.lay_out(package, out, self.layout)
        how = f"interpreted beside the package before; in float32 within {made.float32.max_abs_error:.2g} of it"
        return self.artifact(
            package.stem,
            out,
            made.float16,
            check=how,
            schedule=f"Core ML's own, layout {self.layout}: {made.after.sentence()}",
            notes=(f"laid out anew; before, {made.before.sentence()}",),
            inputs=made.inputs,
            outputs=made.outputs,
        )

    def answers(
        self, artifact: Artifact, module: nn.Module, example_inputs: tuple[Tensor, ...]
    ) -> Callable[..., tuple[Tensor, ...]]:
        with package.quiet():
            program = interpreter.load(artifact.path / package.NAME)

        def answer(*given: Tensor) -> tuple[Tensor, ...]:
            taken, _ = _as_core_ml_takes(given)
            _, found = lowering.answers(program, taken, artifact.labels)
            return tuple(map(torch.from_numpy, found))

        return answer

    def _wanted(self, name: str) -> package.Wanted:
        return package.Wanted(self.layout, self.minimum_target, about=f"{name}, lowered by attnrewrite")

    def estimate(self, artifact: Artifact) -> Estimate | None:
        with package.quiet():
            return latency.estimate(interpreter.load(artifact.path / package.NAME))

    def pricing(self) -> Pricing | Refusal:
        missing = self.availability().build
        return missing or Pricing("estimated time", f"the estimate of {self.name}", self._price)

    def _price(self, module: nn.Module, example_inputs: tuple[Tensor, ...]) -> float:
        wide = in_float32(module, example_inputs)
        inputs, _ = _as_core_ml_takes(wide.inputs)
        program = canonical(each_once(wide.module, inputs)[0])
        with tempfile.TemporaryDirectory() as folder, package.quiet():
            return latency.estimate(
                interpreter.load(package.convert(program, Path(folder), "FLOAT16", self._wanted("a part")))
            ).ms

    def runs(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], *, threads: int
    ) -> tuple[Run, ...]:
        reason = self.availability().measure
        if reason is not None:
            return (Run.refused("core ml", reason),)
        phone = self._phone()
        measure = _on_this_mac if phone is None else partial(on_phone.run, at=phone)
        try:
            wide = in_float32(module, example_inputs)
            taken, _ = _as_core_ml_takes(wide.inputs)
            program, module, _ = each_once(wide.module, taken)
            with tempfile.TemporaryDirectory() as folder:
                path = package.convert(canonical(program), Path(folder), "FLOAT16", self._wanted(name))
                return (measure(name, path, arrays(taken), reference(module, wide.inputs)),)
        except AttnRewriteError as error:
            return (Run.refused("core ml", Refusal("failed", str(error))),)

    def _phone(self) -> on_phone.Phone | None:
        """The device to measure on, None for this machine. InputError where it is named as none can be."""
        return None if self.device is None else on_phone.Phone(self.device, self.development_team, self.device_timeout)


_FOREIGN = (torch.uint8, torch.int8, torch.int16, torch.int64)


def _as_core_ml_takes(inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """The inputs in types that Core ML has, and a note for each that is another: bytes are given as 32-bit numbers."""
    foreign = {place: tensor.dtype for place, tensor in enumerate(inputs) if tensor.dtype in _FOREIGN}
    given = tuple(tensor.int() if place in foreign else tensor for place, tensor in enumerate(inputs))
    names = ", ".join(f"{place} ({str(dtype).removeprefix('torch.')})" for place, dtype in foreign.items())
    return given, (f"takes int32 for input {names}",) if names else ()


def _on_this_mac(subject: str, path: Path, inputs: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> Run:
    """The package at `path` run by Core ML itself."""
    model, loaded = on_mac.load(path)
    spec = model.get_spec().description
    feed = dict(zip([given.name for given in spec.input], inputs, strict=True))
    predicted = model.predict(feed)
    found = [predicted[output.name] for output in spec.output]
    agreement = check.agree(f"{subject} in Core ML", found, expected, check.FLOAT16)
    size = size_bytes(path)
    return Run("core ml", lambda: model.predict(feed), agreement.max_abs_error, size, None, loaded.sentence())
