"""Mobile GPUs: TVM through OpenCL, called from 64-bit Android."""

from pathlib import Path

from torch import Tensor, nn

from attnrewrite.errors import Refusal
from attnrewrite.targets.base import Artifact, Availability, Run, Target
from attnrewrite.targets.prepare import arrays, in_float32, specialise
from attnrewrite.targets.runners import opencl
from attnrewrite.targets.runners.programs import Unavailable
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm import device as tvm_device
from attnrewrite.targets.tvm.importer import import_program

EXECUTION_S = 120  # seconds that the kernels may take on this machine's OpenCL device
ON_HOST = "same program compiled for this host and run; the OpenCL kernels themselves were not run"
NOT_MEASURED = Refusal("needs-device", "measured on a phone's GPU only")


class Gpu(Target):
    """OpenCL kernels and their host code as object files; beside them the kernels' source and how to launch them."""

    name = "gpu"
    summary = "mobile GPUs: TVM (OpenCL), called from 64-bit Android"

    def availability(self) -> Availability:
        return Availability(build=tvm_compat.why_missing(), measure=NOT_MEASURED)

    def lower(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], out: Path, *, threads: int
    ) -> Artifact:
        self.require_build()
        wide = in_float32(module, example_inputs)
        program = import_program(specialise(wide.module, wide.inputs))
        compiled = tvm_device.build(program, tvm_compat.profile(self.name))
        tvm_compat.export_objects(compiled.executable, out / "model.tar")
        (out / "kernels.cl").write_text(tvm_compat.kernel_sources(compiled.executable, "opencl"))
        try:
            kernels = tvm_device.device_program(compiled)
            (out / "launches.json").write_text(opencl.launches_json(kernels))
            found, device = opencl.execute(kernels, arrays(wide.inputs), EXECUTION_S)
            how = f"kernels run with OpenCL on {device}"
        except Unavailable as reason:
            host = tvm_compat.build_for_cpu(program, "host")
            found, how = tvm_compat.bind(host.executable, wide.inputs, threads)(), f"{ON_HOST}: {reason}"
        agreement = wide.agree(f"{name} for {self.name}", found)
        return self.artifact(
            name,
            out,
            agreement,
            check=how,
            schedule=tvm_compat.DEFAULT_SCHEDULE,
            notes=("object files: link them with the Android NDK", *wide.notes),
            inputs=arrays(wide.inputs),
            outputs=found,
            processor=tvm_compat.profile(self.name),
            runtime=tvm_compat.runtime_packages().versions,
        )

    def runs(
        self, name: str, module: nn.Module, example_inputs: tuple[Tensor, ...], *, threads: int
    ) -> tuple[Run, ...]:
        return (Run.refused("tvm", NOT_MEASURED),)
