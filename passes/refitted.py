"""Where a model stores what a plan refitted outside the sites: under the plan's name for it, or under another one, as
exporters name weights anew and store some transposed.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache

import numpy as np
from torch import Tensor

from attnrewrite.errors import InputError
from attnrewrite.patterns.weights import same_weights, sketch
from attnrewrite.plan import Plan

Shape = tuple[int, ...]

_WAY_OUT = "apply it to the model it was made from"


def located(
    plan: Plan, shapes: Mapping[str, Shape], read: Callable[[str], np.ndarray], called: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str, Tensor]]:
    """For each parameter that `plan` refits, its name, that of the model's own tensor, and what to store there.

    `shapes` are the model's tensors, `read` gives their elements; `called` is what a tensor is also known by.

    Raises:
        InputError: the model has no such tensor, or several that may be it.
    """

    @cache  # many tensors of a model are of one shape, and each is asked for by all that are missing
    def sketched(own: str, transposed: bool) -> str:
        return sketch(read(own).T if transposed else read(own))

    for name, tensor in plan.parameters.items():
        own, wanted, was = (called or {}).get(name, name), tuple(tensor.shape), plan.replaced.get(name)
        if shapes.get(own) == wanted and (was is None or same_weights(sketched(own, False), was)):
            yield name, own, tensor
            continue
        alike = [each for each in _of_shape(wanted, shapes) if was is not None and same_weights(sketched(*each), was)]
        if len(alike) != 1:
            raise InputError(f"the plan refits {name}{_why_not(own, wanted, alike, shapes)}; {_WAY_OUT}")
        ((found, transposed),) = alike
        yield name, found, tensor.T if transposed else tensor


def _why_not(own: str, wanted: Shape, alike: list[tuple[str, bool]], shapes: Mapping[str, Shape]) -> str:
    """What is wrong where none of a model's tensors is the one, or several are."""
    if alike:
        names = ", ".join(sorted({name for name, _ in alike})[:3])
        return f", and the model stores several tensors like it ({names})"
    if own not in shapes:
        return ", which the model does not store"
    return f" of shape {wanted}, the model has {shapes[own] if shapes[own] != wanted else 'other numbers'}"


def _of_shape(wanted: Shape, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, bool]]:
    """The tensors of a shape, and those that have it transposed."""
    for name, shape in shapes.items():
        if shape == wanted:
            yield name, False
        if len(wanted) == 2 and shape == wanted[::-1]:
            yield name, True
