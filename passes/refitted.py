"""Where a model stores what a plan refitted outside the sites: under the plan's name for it, or under another one, as
exporters name weights anew and store some transposed."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from torch import Tensor

from attnrewrite.errors import InputError
from attnrewrite.patterns.weights import same_weights, sketch
from attnrewrite.plan import Plan

Shape = tuple[int, ...]


def located(
    plan: Plan, shapes: Mapping[str, Shape], read: Callable[[str], np.ndarray], called: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str, Tensor]]:
    """For each parameter that `plan` refits, its name, that of the model's own tensor, and what to store there.

    `shapes` are the model's tensors, `read` gives their elements; `called` is what a tensor is also known by.

    Raises:
        InputError: the model has no such tensor, or several that may be it.
    """
    for name, tensor in plan.parameters.items():
        own, wanted = (called or {}).get(name, name), tuple(tensor.shape)
        if shapes.get(own) == wanted:
            yield name, own, tensor
            continue
        was = plan.replaced.get(name)
        found = [] if was is None else [match for other in shapes for match in _alike(other, wanted, was, shapes, read)]
        if len(found) > 1:
            alike = ", ".join(sorted({other for other, _ in found})[:3])
            raise InputError(
                f"the plan refits {name}, and the model stores several tensors like it ({alike}); {_WAY_OUT}"
            )
        if not found and own in shapes:
            raise InputError(f"the plan refits {name} of shape {wanted}, the model has {shapes[own]}")
        if not found:
            raise InputError(f"the plan refits {name}, which the model does not store; {_WAY_OUT}")
        ((other, transposed),) = found
        yield name, other, tensor.T if transposed else tensor


_WAY_OUT = "apply it to the model it was made from"


def _alike(
    other: str, wanted: Shape, was: str, shapes: Mapping[str, Shape], read: Callable[[str], np.ndarray]
) -> Iterator[tuple[str, bool]]:
    """`other`, and whether it is transposed, where its elements are those that `was` tells of."""
    if shapes[other] == wanted and same_weights(sketch(read(other)), was):
        yield other, False
    if len(wanted) == 2 and shapes[other] == wanted[::-1] and same_weights(sketch(read(other).T), was):
        yield other, True
