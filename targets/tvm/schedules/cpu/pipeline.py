"""The table of CPU rules in the order in which they are asked, and the Relax pipeline that applies them."""

from typing import Any

import tvm

from attnrewrite.targets.tvm.schedules.cpu.attention import ATTENTION
from attnrewrite.targets.tvm.schedules.cpu.convolution import CONVOLUTION
from attnrewrite.targets.tvm.schedules.cpu.elementwise import ARITHMETIC, JOIN, PAD
from attnrewrite.targets.tvm.schedules.cpu.matmul import MATMUL
from attnrewrite.targets.tvm.schedules.cpu.normalisation import NORM, SOFTMAX
from attnrewrite.targets.tvm.schedules.cpu.reduction import POOL, REDUCTION
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.rewrite import Scheduled, rewrite
from attnrewrite.targets.tvm.schedules.rule import Rule

RULES: tuple[Rule, ...] = (ATTENTION, MATMUL, CONVOLUTION, NORM, SOFTMAX, REDUCTION, POOL, JOIN, PAD, ARITHMETIC)


def schedule(module: Any, profile: Profile) -> Scheduled:
    """A Relax module with our kernels for a processor in the place of whatever operators there are kernels for."""
    return rewrite(module, RULES, profile)


def build(module: Any, profile: Profile) -> Any:
    """A scheduled module compiled for the processor it was scheduled for."""
    target = tvm.target.Target(dict(profile.target))
    with target:
        return tvm.relax.build(module, target, relax_pipeline=lowering(target))


def lowering(target: Any) -> Any:
    """The passes of TVM's default pipeline for CPUs, which leave kernels alone and compile everything else."""
    from tvm.relax.backend.cpu_generic import pipeline

    return tvm.transform.Sequential(
        [
            *pipeline.library_dispatch_passes(target),
            *pipeline.legalize_passes(target),
            *pipeline.dataflow_lower_passes(target),
            *pipeline.finalize_passes(target),
        ]
    )
