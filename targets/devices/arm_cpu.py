"""64-bit ARM processors, under Linux, Android or iOS: TVM cross-compiled."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attnrewrite.errors import InputError, Refusal, unknown_name
from attnrewrite.targets.base import Artifact, Availability, Pricing, Run, Target
from attnrewrite.targets.devices import in_precision, over_rpc
from attnrewrite.targets.prepare import arrays, in_float32, specialise
from attnrewrite.targets.runners import qemu
from attnrewrite.targets.runners.cycles import estimated
from attnrewrite.targets.runners.device_process import require_patience
from attnrewrite.targets.runners.programs import Unavailable
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm.importer import import_program
from attnrewrite.targets.tvm.schedules.precision import FP32, require
from attnrewrite.targets.tvm.schedules.profile import HOST, arm_cores, profile, system_of, systems

ON_HOST = "same program compiled for this host and run; aarch64 code not executed"
NOT_MEASURED = Refusal("needs-device", "measured on an ARM device only (--rpc HOST:PORT; there, target host)")
LINUX = "linux"


@dataclass(frozen=True)
class ArmCpu(Target):
    """A shared library for a core under Linux; elsewhere, or where no cross-linker is, the objects to link one from.

    `cpu` is one of the ARM cores of profiles.toml, `system` one of its systems (None: the core's usual one). `rpc` is
    the address of a device to measure on, "host:port", which may take `rpc_timeout` seconds for a model. The emulated
    run of two calls may take `emulation_s` seconds. Products are computed in `precision`, one of profiles.toml.
    """

    cpu: str = "cortex-a76"
    system: str | None = None
    rpc: str | None = None
    rpc_timeout: float = over_rpc.TIMEOUT_S
    emulation_s: float = 240.0
    precision: str = FP32

    name = "arm-cpu"
    summary = "64-bit ARM under Linux or Android: TVM (LLVM), cross-compiled"
    has_answers = True
    answers_note = (
        "answered the images compiled for this host: the same program; what ran for the check is the artifact"
    )

    def __post_init__(self) -> None:
        if self.cpu not in arm_cores():
            raise unknown_name("ARM processor", self.cpu, arm_cores())
        if self.system is not None and self.system not in systems():
            raise unknown_name("system", self.system, systems())
        require(self.precision, self.cpu)
        over_rpc.device(self.rpc, self.rpc_timeout)
        require_patience("emulation_s", self.emulation_s)

    def availability(self) -> Availability:
        return Availability(build=tvm_compat.why_missing(), measure=NOT_MEASURED if self.rpc is None else None)

    def loses(self, runtime: str | None = None) -> Refusal | None:
        return in_precision.loss(self.precision)

    def answers(
        self, artifact: Artifact, module: nn.Module, example_inputs: tuple[Tensor, ...]
    ) -> Callable[..., tuple[Tensor, ...]]:
        meant = in_precision.meant(in_float32(module, example_inputs), self.precision, self.cpu)
        program = import_program(specialise(meant.module, meant.inputs))
        host = tvm_compat.build_for_cpu(program, HOST, precision=self.precision, stands_for=self.cpu)
        return in_precision.answering(tvm_compat.answering(host.executable, threads=1))

    def lower(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], out: Path, *, threads: int
    ) -> Artifact:
        self.require_build()
        meant = in_precision.meant(in_float32(module, example_inputs), self.precision, self.cpu)
        program = import_program(specialise(meant.module, meant.inputs))
        packages = tvm_compat.runtime_packages()
        library, made, notes = self._built(program, out)
        system = self.system or system_of(self.cpu)
        try:
            if system != LINUX:
                raise Unavailable(f"it is for {system}, which is not emulated here")
            ran, how = qemu.execute(library, arrays(meant.inputs), packages, self.emulation_s), "ran under qemu-aarch64"
        except Unavailable as reason:
            host = tvm_compat.build_for_cpu(program, HOST, precision=self.precision, stands_for=self.cpu)
            found = tvm_compat.bind(host.executable, meant.inputs, threads)()
            ran, how = qemu.Executed(found), f"{ON_HOST}: {reason}"
        cycles, counting = self._cycles(ran)
        agreement = meant.agree(f"{name} for {self.name}", ran.outputs)
        return self.artifact(
            name,
            out,
            agreement,
            check=how,
            schedule=made.schedule,
            notes=(*notes, *counting, *meant.notes),
            inputs=arrays(meant.inputs),
            outputs=ran.outputs,
            operators=made.operators,
            instructions=ran.instructions,
            cycles=cycles,
            processor=made.processor,
            runtime=packages.versions,
            precision=self.precision,
        )

    def _built(self, program: Any, out: Path) -> tuple[Path, tvm_compat.Scheduled, tuple[str, ...]]:
        """The library, or its objects where nothing here links them, which is said; and what was compiled."""
        if (system := self.system or system_of(self.cpu)) != LINUX:
            note = f"object files: link them to a library with the compiler for {system}"
        elif shutil.which(qemu.CROSS_COMPILER):
            library = out / "model.so"
            made = tvm_compat.library_for_cpu(
                program, self.cpu, library, qemu.CROSS_COMPILER, self.system, self.precision
            )
            return library, made, ()
        else:
            note = f"object files instead of a library: {qemu.CROSS_COMPILER} is not installed to link them"
        made = tvm_compat.build_for_cpu(program, self.cpu, self.system, self.precision)
        return tvm_compat.export_objects(made.executable, out / "model.tar"), made, (note,)

    def _cycles(self, ran: qemu.Executed) -> tuple[int | None, tuple[str, ...]]:
        """What the core takes for the call by LLVM's estimate, and what is to be said of that."""
        if not ran.blocks:
            return None, (f"instructions not counted: {ran.uncounted}",) if ran.uncounted else ()
        try:
            found = estimated(ran.blocks, profile(self.cpu).target["mcpu"])
        except Unavailable as reason:
            return None, (f"cycles not estimated: {reason}",)
        return found.number, (found.how,)

    def pricing(self) -> Pricing | Refusal:
        if (missing := self.availability().build) is not None:
            return missing
        try:
            if (self.system or system_of(self.cpu)) != LINUX:
                raise Unavailable("only what is for linux is emulated here")
            qemu.counter_of(tvm_compat.runtime_packages())
        except Unavailable as reason:
            return Refusal("no-prices", f"instructions cannot be counted: {reason}")
        return Pricing("instructions", f"instructions for {self.cpu} counted under qemu-aarch64", self._instructions)

    def _instructions(self, module: nn.Module, example_inputs: tuple[Tensor, ...]) -> float:
        with tempfile.TemporaryDirectory() as folder:
            made = self.lower("a part", module, example_inputs, Path(folder), threads=1)
        if made.instructions is None:
            raise InputError(f"its instructions were not counted: {'; '.join((made.check, *made.notes))}")
        return float(made.instructions)

    def runs(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], *, threads: int
    ) -> tuple[Run, ...]:
        device = over_rpc.device(self.rpc, self.rpc_timeout)
        if device is None:
            return (Run.refused("tvm", NOT_MEASURED),)
        meant = in_precision.meant(in_float32(module, example_inputs), self.precision, self.cpu)

        def build(folder: Path) -> tuple[Path, tuple[str, ...]]:
            library, made, notes = self._built(import_program(specialise(meant.module, meant.inputs)), folder)
            return library, (f"schedule: {made.schedule}", *notes, *meant.notes)

        return (over_rpc.run(name, meant, build, device, threads),)
