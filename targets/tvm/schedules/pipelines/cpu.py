"""The table of CPU rules in the order in which they are asked, and the Relax pipeline that applies them."""

from typing import Any

import tvm
from tvm.relax.backend.cpu_generic import pipeline as cpu_generic

from attnrewrite.targets.tvm.schedules.cpu.attention.rule import ATTENTION
from attnrewrite.targets.tvm.schedules.cpu.convolution.rule import CONVOLUTION
from attnrewrite.targets.tvm.schedules.cpu.elementwise import ARITHMETIC, JOIN, PAD
from attnrewrite.targets.tvm.schedules.cpu.gather import TAKE
from attnrewrite.targets.tvm.schedules.cpu.int8.rule import MATMUL_INT8
from attnrewrite.targets.tvm.schedules.cpu.matmul import MATMUL
from attnrewrite.targets.tvm.schedules.cpu.normalisation import GROUP_NORM, NORM, SOFTMAX
from attnrewrite.targets.tvm.schedules.cpu.reduction import POOL, REDUCTION
from attnrewrite.targets.tvm.schedules.cpu.strassen.rule import STRASSEN
from attnrewrite.targets.tvm.schedules.cpu.winograd.rule import WINOGRAD
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.rewrite import Scheduled, rewrite
from attnrewrite.targets.tvm.schedules.rule import Rule

RULES: tuple[Rule, ...] = (
    ATTENTION,
    MATMUL_INT8,
    STRASSEN,
    MATMUL,
    WINOGRAD,
    CONVOLUTION,
    NORM,
    GROUP_NORM,
    SOFTMAX,
    REDUCTION,
    POOL,
    TAKE,
    JOIN,
    PAD,
    ARITHMETIC,
)


def schedule(module: Any, profile: Profile) -> Scheduled:
    """A Relax module with our kernels for a processor in the place of whatever operators there are kernels for."""
    return rewrite(module, RULES, profile)


def relax_pipeline(profile: Profile) -> Any:
    """A pass that schedules a Relax module and lowers it, for `tvm.compile(..., relax_pipeline=...)`."""

    @tvm.transform.module_pass(opt_level=0, name="AttnRewriteSchedules")
    def run(module: Any, _: Any) -> Any:
        return lowering(tvm.target.Target.current())(schedule(module, profile).module)

    return run


def build(module: Any, profile: Profile) -> Any:
    """A scheduled module compiled for the processor it was scheduled for."""
    target = tvm.target.Target(dict(profile.target))
    # The pass that would merge buffers forgets which of them lie on the stack.
    with target, tvm.transform.PassContext(config={"tirx.disable_storage_rewrite": True}):
        return tvm.relax.build(module, target, relax_pipeline=lowering(target))


def lowering(target: Any) -> Any:
    """The passes of TVM's default pipeline for CPUs, which leave kernels alone and compile everything else."""
    passes = (
        cpu_generic.library_dispatch_passes(target),
        cpu_generic.legalize_passes(target),
        cpu_generic.dataflow_lower_passes(target),
        cpu_generic.finalize_passes(target),
    )
    return tvm.transform.Sequential([each for group in passes for each in group])
