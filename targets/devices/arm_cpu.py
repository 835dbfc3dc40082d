"""ARM processors under Linux: TVM cross-compiled to aarch64."""

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attnrewrite.errors import Refusal
from attnrewrite.targets import agreement as check
from attnrewrite.targets.base import Artifact, Availability, Run, Target
from attnrewrite.targets.prepare import arrays, in_float32, reference, specialise
from attnrewrite.targets.runners import qemu
from attnrewrite.targets.runners.programs import Unavailable
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm.importer import import_program

ON_HOST = "same program compiled for this host and run; aarch64 code not executed"
NOT_MEASURED = Refusal("needs-device", "measured on an ARM device only (there, target host measures it)")
CORE = "cortex-a76"
EMULATION_S = 120  # seconds that the emulated run may take


class ArmCpu(Target):
    """64-bit ARM Linux, by default as a Cortex-A76 sees it: a shared library, or the objects to link one from."""

    name = "arm-cpu"
    summary = "64-bit ARM Linux: TVM (LLVM), cross-compiled"

    def availability(self) -> Availability:
        return Availability(build=tvm_compat.why_missing(), measure=NOT_MEASURED)

    def lower(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], out: Path, *, threads: int
    ) -> Artifact:
        self.require_build()
        wide = in_float32(module, example_inputs)
        program = import_program(specialise(wide.module, wide.inputs))
        made = tvm_compat.build_for_cpu(program, CORE)
        library, notes = _export(made.executable, out)
        try:
            found, how = (
                qemu.execute(library, arrays(wide.inputs), tvm_compat.runtime_packages(), EMULATION_S),
                "ran under qemu-aarch64",
            )
        except Unavailable as reason:
            host = tvm_compat.build_for_cpu(program, "host")
            found, how = tvm_compat.bind(host.executable, wide.inputs, threads)(), f"{ON_HOST}: {reason}"
        agreement = check.agree(f"{name} for {self.name}", found, reference(wide.module, wide.inputs), check.FLOAT32)
        return self.artifact(
            name,
            out,
            agreement,
            check=how,
            schedule=made.schedule,
            notes=(*notes, *wide.notes),
            inputs=arrays(wide.inputs),
            outputs=found,
            operators=made.operators,
        )

    def runs(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], *, threads: int
    ) -> tuple[Run, ...]:
        return (Run.refused("tvm", NOT_MEASURED),)


def _export(executable: Any, out: Path) -> tuple[Path, tuple[str, ...]]:
    """Write the library, or its objects where no cross-linker is there, and say so."""
    if shutil.which(qemu.CROSS_COMPILER):
        return tvm_compat.export_library(executable, out / "model.so", qemu.CROSS_COMPILER), ()
    note = f"object files instead of a library: {qemu.CROSS_COMPILER} is not installed to link them"
    return tvm_compat.export_objects(executable, out / "model.tar"), (note,)
