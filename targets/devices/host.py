"""The machine we are on: TVM through LLVM, beside torch eager and onnxruntime, which users compare with."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from attnrewrite.errors import AttnRewriteError, Refusal
from attnrewrite.targets.base import Artifact, Availability, Run, Target
from attnrewrite.targets.devices import in_precision, over_rpc
from attnrewrite.targets.prepare import Prepared, arrays, in_float32, specialise
from attnrewrite.targets.runners import onnx_runtime
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm.importer import import_program
from attnrewrite.targets.tvm.rpc import Device
from attnrewrite.targets.tvm.schedules.precision import FP32, require
from attnrewrite.targets.tvm.schedules.profile import HOST

LIBRARY = "model.so"
FLOAT32 = ("torch eager", "onnxruntime")  # runtimes that compute so, whatever the precision of ours


@dataclass(frozen=True)
class Host(Target):
    """This machine's processor; and that of another machine of its kind, at the address `rpc`, "host:port", which may
    take `rpc_timeout` seconds for a model. TVM computes products in `precision`, one of profiles.toml.
    """

    rpc: str | None = None
    rpc_timeout: float = over_rpc.TIMEOUT_S
    precision: str = FP32

    name = "host"
    summary = "this machine's processor: TVM (LLVM), beside torch eager and onnxruntime"
    has_answers = True

    def __post_init__(self) -> None:
        if self.precision != FP32 and tvm_compat.why_missing() is None:  # it is LLVM that knows what this processor has
            require(self.precision, HOST)
        over_rpc.device(self.rpc, self.rpc_timeout)

    def availability(self) -> Availability:
        return Availability(build=tvm_compat.why_missing() or tvm_compat.why_no_linker(), measure=None)

    def loses(self, runtime: str | None = None) -> Refusal | None:
        return None if runtime in FLOAT32 else in_precision.loss(self.precision)

    def answers(
        self, artifact: Artifact, module: nn.Module, example_inputs: tuple[Tensor, ...]
    ) -> Callable[..., tuple[Tensor, ...]]:
        return in_precision.answering(tvm_compat.answering(artifact.path / LIBRARY, threads=1))

    def lower(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], out: Path, *, threads: int
    ) -> Artifact:
        self.require_build()
        meant = in_precision.meant(in_float32(module, example_inputs), self.precision, HOST)
        library, made = _link(meant, out, self.precision)
        found = tvm_compat.bind(library, meant.inputs, threads)()
        agreement = meant.agree(f"{name} for {self.name}", found)
        return self.artifact(
            name,
            out,
            agreement,
            check="ran in TVM on this host",
            schedule=made.schedule,
            notes=meant.notes,
            inputs=arrays(meant.inputs),
            outputs=found,
            operators=made.operators,
            processor=made.processor,
            runtime=tvm_compat.runtime_packages().versions,
            precision=self.precision,
        )

    def runs(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], *, threads: int
    ) -> tuple[Run, ...]:
        wide = in_float32(module, example_inputs)
        runs = []
        for runtime, prepare in _RUNTIMES.items():
            try:
                meant, call, size_bytes, note = prepare(wide, threads, self.precision)
                agreement = meant.agree(f"{name} in {runtime}", arrays(call()))
                note = "; ".join(filter(None, (note, *meant.notes)))
                runs.append(Run(runtime, call, agreement.max_abs_error, size_bytes, None, note))
            except AttnRewriteError as error:
                runs.append(Run.refused(runtime, Refusal("failed", str(error))))
        device = over_rpc.device(self.rpc, self.rpc_timeout)
        return tuple(runs) if device is None else (*runs, self._elsewhere(name, wide, device, threads))

    def _elsewhere(self, name: str, wide: Prepared, device: Device, threads: int) -> Run:
        """The module on a device with a processor like ours."""
        meant = in_precision.meant(wide, self.precision, HOST)

        def build(folder: Path) -> tuple[Path, tuple[str, ...]]:
            library, made = _link(meant, folder, self.precision)
            return library, (f"schedule: {made.schedule}", *meant.notes)

        return over_rpc.run(name, meant, build, device, threads)


# What a runtime computes, a call, the bytes that it takes, and what to know about it.
Called = tuple[Prepared, Callable[[], object], int, str]


def _eager(wide: Prepared, threads: int, _: str) -> Called:
    module, inputs = wide.module, wide.inputs

    def call() -> object:
        # The number of threads belongs to the process: set on each call, as nothing else keeps it.
        torch.set_num_threads(threads)
        with torch.inference_mode():
            return module(*inputs)

    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}
    return wide, call, sum(sizes.values()), ""


def _onnxruntime(wide: Prepared, threads: int, _: str) -> Called:
    return wide, *onnx_runtime.prepare(wide.module, wide.inputs, threads), ""


def _tvm(wide: Prepared, threads: int, precision: str) -> Called:
    Host().require_build()
    meant = in_precision.meant(wide, precision, HOST)
    with tempfile.TemporaryDirectory() as folder:
        library, _ = _link(meant, Path(folder), precision)
        note = f"schedule: {tvm_compat.CPU_SCHEDULE}, products in {precision}"
        return meant, tvm_compat.bind(library, meant.inputs, threads), library.stat().st_size, note


def _link(meant: Prepared, folder: Path, precision: str) -> tuple[Path, tvm_compat.Scheduled]:
    """The module compiled for this processor, as a shared library in `folder`."""
    program = import_program(specialise(meant.module, meant.inputs))
    library, linker = folder / LIBRARY, tvm_compat.host_linker()
    return library, tvm_compat.library_for_cpu(program, HOST, library, linker, precision=precision)


# Each runtime's way to prepare a call in a precision; only ours has several.
_RUNTIMES: dict[str, Callable[[Prepared, int, str], Called]] = {
    "torch eager": _eager,
    "onnxruntime": _onnxruntime,
    "tvm": _tvm,
}
