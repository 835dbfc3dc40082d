"""Forms as the benchmarks name them: a variant, and options after a colon, such as "l1:approximate=true,local=true"."""

from torch import Tensor, nn

from attnrewrite import api
from attnrewrite.conversion.record import deployed


def named(text: str) -> tuple[str, dict[str, str]]:
    """The variant and its options."""
    variant, _, options = text.partition(":")
    return variant, dict(option.split("=", 1) for option in options.split(",") if option)


def converted(module: nn.Module, inputs: tuple[Tensor, ...], form: str) -> nn.Module:
    """The module with `form` at every site that takes it, uncalibrated, as it is deployed."""
    variant, options = named(form)
    return deployed(api.convert(module, inputs, variant=variant, options=options).module)
