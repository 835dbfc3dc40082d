"""ARM processors under Linux: TVM cross-compiled to aarch64."""

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attnrewrite.targets import check, tvm_compat
from attnrewrite.targets.base import Artifact, Availability, Run, Target
from attnrewrite.targets.prepare import reference, specialise

CROSS_COMPILER = "aarch64-linux-gnu-g++"
NOT_MEASURED = "needs an ARM device, and there is none here"


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
        program = tvm_compat.import_program(specialise(module, example_inputs))
        notes = _export(tvm_compat.build(program, tvm_compat.profile(self.name)), out)
        host = tvm_compat.build(program, tvm_compat.host_profile())
        found = tvm_compat.bind(host, example_inputs, threads)()
        agreement = check.agree(f"{name} for {self.name}", found, reference(module, example_inputs), check.FLOAT32)
        return self.artifact(
            name,
            out,
            agreement,
            check="same program compiled for this host and run; aarch64 code not executed",
            schedule=tvm_compat.DEFAULT_SCHEDULE,
            notes=notes,
        )

    def runs(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], *, threads: int
    ) -> tuple[Run, ...]:
        return (Run("tvm", None, None, None, NOT_MEASURED),)


def _export(executable: Any, out: Path) -> tuple[str, ...]:
    """Write the library, or its objects where no cross-linker is there, and say so."""
    if shutil.which(CROSS_COMPILER):
        tvm_compat.export_library(executable, out / "model.so", CROSS_COMPILER)
        return ()
    tvm_compat.export_objects(executable, out / "model.tar")
    return (f"object files instead of a library: {CROSS_COMPILER} is not installed to link them",)
