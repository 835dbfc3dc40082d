"""Names to variants: the built-in ones, and those that installed packages register."""

from collections.abc import Mapping
from typing import Any

from attnrewrite.errors import Refusal
from attnrewrite.plugins import Registry, Rules
from attnrewrite.variants.additive import Additive
from attnrewrite.variants.base import Variant
from attnrewrite.variants.feature_maps import Elu, Hedgehog, ReluLinear
from attnrewrite.variants.hydra import Hydra
from attnrewrite.variants.l1 import L1
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.masked import Masked
from attnrewrite.variants.mobile import Mobile
from attnrewrite.variants.options import option_values, with_options
from attnrewrite.variants.polynomial import Polynomial
from attnrewrite.variants.separable import Separable
from attnrewrite.variants.softmax import Softmax
from attnrewrite.variants.taylor import Taylor
from attnrewrite.variants.xca import CrossCovariance

__all__ = ["BUILT_IN", "REGISTRY", "get_variant", "option_values", "unusable", "variants"]

BUILT_IN: tuple[type[Variant], ...] = (
    Softmax,
    L1,
    Mobile,
    Masked,
    Additive,
    Separable,
    Polynomial,
    ReluLinear,
    Elu,
    Hedgehog,
    Taylor,
    Hydra,
    CrossCovariance,
)


def _try_out(variant: Variant) -> Refusal | None:
    if with_options(type(variant), option_values(variant)) == variant:
        return None
    return Refusal("options-not-kept", "has options that a plan cannot keep (numbers, texts, choices, lists)")


REGISTRY = Registry(
    "variant",
    "attnrewrite.variants",
    lambda: {variant.name: variant for variant in BUILT_IN},
    Rules(
        base=Variant,
        texts=("summary", "source"),
        methods={LinearVariant: ("form", "form_multiplies"), Variant: ("refuse", "build", "multiplies")},
        try_out=_try_out,
    ),
)


def variants() -> dict[str, type[Variant]]:
    """Every variant by name: the built-in ones first, then those that installed packages register."""
    return REGISTRY.usable()


def unusable() -> dict[str, str]:
    """What installed packages register by name and cannot be used, and why; a built-in variant keeps its name."""
    return REGISTRY.unusable()


def get_variant(name: str, options: Mapping[str, Any] | None = None) -> Variant:
    """The variant called `name`. Options are Python values, or strings as the command line gives them.

    Raises InputError for an unknown name or option, or a value of the wrong type or out of range.
    """
    return with_options(REGISTRY.get(name), options or {})
