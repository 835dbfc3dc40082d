"""The precisions that products are computed in, by name, and which processors have instructions for them."""

from attnrewrite.errors import InputError, Refusal, unknown_name
from attnrewrite.targets.tvm.schedules.profile import (
    FLOAT32,
    HOST,
    Profile,
    arm_cores,
    features_for,
    precisions,
    profile,
    stored_for,
)

FP32 = "fp32"
FP16 = "fp16"
INT8 = "int8"


def refusal(precision: str, processor: Profile) -> Refusal | None:
    """Why a processor does not compute in a precision of `precisions()`, or None where it does."""
    wanted = features_for(precision)
    if not wanted or processor.features & set(wanted):
        return None
    return Refusal("instructions", f"has no instructions for {precision} ({' or '.join(wanted)})")


def stored(precision: str, processor: Profile) -> str:
    """The type of what kernels leave for others in a precision, and of products that are not of integers."""
    return stored_for(precision) if refusal(FP16, processor) is None else FLOAT32


def require(precision: str, core: str) -> None:
    """Do nothing where the processor `core` (of profiles.toml, or `host`) computes in `precision`.

    Raises:
        InputError: it does not, or there is no such precision; the message has the way out.
    """
    if precision not in precisions():
        raise unknown_name("precision", precision, precisions())
    if precision == FP32:
        return
    reason = refusal(precision, profile(core))
    if reason is not None:
        able = () if core == HOST else [each for each in arm_cores() if refusal(precision, profile(each)) is None]
        others = f", or give --cpu {' or '.join(able)}" if able else ""
        raise InputError(f"--precision {precision}: {core} {reason}: leave it out{others}")
