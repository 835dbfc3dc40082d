"""The machine we are on: TVM through LLVM, beside torch eager and onnxruntime, which users compare with."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from attnrewrite.errors import AttnRewriteError, Refusal
from attnrewrite.targets.base import Artifact, Availability, Run, Target
from attnrewrite.targets.devices import over_rpc
from attnrewrite.targets.devices.checked import agreed
from attnrewrite.targets.prepare import Prepared, arrays, in_float32, specialise
from attnrewrite.targets.runners import onnx_runtime
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm.importer import import_program
from attnrewrite.targets.tvm.rpc import Device
from attnrewrite.targets.tvm.schedules.precision import FP32, require


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

    def __post_init__(self) -> None:
        if self.precision != FP32 and tvm_compat.why_missing() is None:  # it is LLVM that knows what this processor has
            require(self.precision, "host")
        over_rpc.device(self.rpc, self.rpc_timeout)

    def availability(self) -> Availability:
        return Availability(build=tvm_compat.why_missing() or tvm_compat.why_no_linker(), measure=None)

    def lower(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], out: Path, *, threads: int
    ) -> Artifact:
        self.require_build()
        wide = in_float32(module, example_inputs)
        library, made = _link(wide.module, wide.inputs, out, self.precision)
        found = tvm_compat.bind(library, wide.inputs, threads)()
        agreement = agreed(f"{name} for {self.name}", found, wide, self.precision)
        return self.artifact(
            name,
            out,
            agreement,
            check="ran in TVM on this host",
            schedule=made.schedule,
            notes=wide.notes,
            inputs=arrays(wide.inputs),
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
        ours = f"schedule: {tvm_compat.CPU_SCHEDULE}, products in {self.precision}"
        runtimes: dict[str, Runtime] = {
            **_OTHERS,
            "tvm": (partial(_tvm, precision=self.precision), (ours,), self.precision),
        }
        for runtime, (prepare, notes, precision) in runtimes.items():
            try:
                call, size_bytes = prepare(wide.module, wide.inputs, threads)
                agreement = agreed(f"{name} in {runtime}", arrays(call()), wide, precision)
                note = "; ".join(notes + wide.notes)
                runs.append(Run(runtime, call, agreement.max_abs_error, size_bytes, None, note))
            except AttnRewriteError as error:
                runs.append(Run.refused(runtime, Refusal("failed", str(error))))
        device = over_rpc.device(self.rpc, self.rpc_timeout)
        return tuple(runs) if device is None else (*runs, self._elsewhere(name, wide, device, threads))

    def _elsewhere(self, name: str, wide: Prepared, device: Device, threads: int) -> Run:
        """The module on a device with a processor like ours."""

        def build(folder: Path) -> tuple[Path, tuple[str, ...]]:
            library, made = _link(wide.module, wide.inputs, folder, self.precision)
            return library, (f"schedule: {made.schedule}", *wide.notes)

        return over_rpc.run(name, wide, build, device, threads, self.precision)


Called = tuple[Callable[[], object], int]
Runtime = tuple[Callable[[nn.Module, tuple[Tensor, ...], int], Called], tuple[str, ...], str]


def _eager(module: nn.Module, inputs: tuple[Tensor, ...], threads: int) -> Called:
    def call() -> object:
        # The number of threads belongs to the process: set on each call, as nothing else keeps it.
        torch.set_num_threads(threads)
        with torch.inference_mode():
            return module(*inputs)

    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}
    return call, sum(sizes.values())


def _tvm(module: nn.Module, inputs: tuple[Tensor, ...], threads: int, *, precision: str) -> Called:
    Host().require_build()
    with tempfile.TemporaryDirectory() as folder:
        library, _ = _link(module, inputs, Path(folder), precision)
        return tvm_compat.bind(library, inputs, threads), library.stat().st_size


def _link(
    module: nn.Module, inputs: tuple[Tensor, ...], folder: Path, precision: str
) -> tuple[Path, tvm_compat.Scheduled]:
    """The module compiled for this processor, as a shared library in `folder`."""
    program, library = import_program(specialise(module, inputs)), folder / "model.so"
    return library, tvm_compat.library_for_cpu(program, "host", library, tvm_compat.host_linker(), precision=precision)


# What users compare with: each runtime's way to prepare a call, what to know about the result, and its precision.
_OTHERS: dict[str, Runtime] = {
    "torch eager": (_eager, (), FP32),
    "onnxruntime": (onnx_runtime.prepare, (), FP32),
}
