"""Transposes moved down a program: past what treats axes alike, and into products, until they meet and are gone.

What is elementwise, reduces, normalises or concatenates does so in the order in which its operands lie in memory. A
product reads either operand turned at no cost, and where its left one lies turned, y^T x^T is what it gives turned: the
queries of linear attention, which a convolution left with the tokens last, leave the products like that, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnrewrite.targets.coreml.operators import arithmetic
from attnrewrite.targets.coreml.passes import views

_OPERANDS = ("x", "y", "a", "b", "cond")
Order = tuple[int, ...]


@dataclass(frozen=True)
class Turned:
    """What an operator gives, before its axes are put in `order`."""

    made: Any
    order: Sequence[int]


def apply(block: Any) -> int:
    """Compute every operator that can be in the order in which its operands lie; how many were."""
    edits = 0
    for operation in list(block.operations):
        rule = RULES.get(operation.op_type)
        found = None if rule is None else rule(operation)
        if found is None:
            continue
        output = operation.outputs[0]
        back = views.reshaped(views.transposed(found.made, found.order, operation), output.shape, operation)
        edits += bool(block.try_replace_uses_of_var_after_op(anchor_op=operation, old_var=output, new_var=back))
    return edits


def lies(variable: Any) -> Order | None:
    """The variable's axes in the order in which they lie in what computed it; None where they lie as they are said."""
    if not views.is_static(variable) or variable.op is None or variable.op.op_type not in views.MOVES:
        return None
    found = views.unmoved(variable)
    if found is None:
        return None
    long = [axis for axis, size in enumerate(variable.shape) if size > 1]
    first = (0,) * variable.rank
    strides = {axis: int(found.index[(*first[:axis], 1, *first[axis + 1 :])] - found.index[first]) for axis in long}
    sorted_ = iter(sorted(long, key=lambda axis: -strides[axis]))
    order = tuple(next(sorted_) if axis in long else axis for axis in range(variable.rank))
    return None if order == tuple(range(variable.rank)) or _view(variable, order) is None else order


def _view(variable: Any, order: Order, rank: int | None = None) -> tuple[views.View, Any] | None:
    """The variable, with axes of one before it up to `rank`, put in `order`; None where that takes a transpose."""
    found = views.unmoved(variable) if views.is_static(variable) else None
    if found is None:
        return None
    padded = found.index.reshape((1,) * ((rank or variable.rank) - variable.rank) + tuple(variable.shape))
    seen = views.view(padded.permute(order))
    if seen is None or sorted(seen.axes, key=lambda axis: -axis[1]) != list(seen.axes):
        return None
    return seen, found.base


def _put(variable: Any, order: Order, before: Any) -> Any:
    """An operand of fewer or as many axes in `order`; None where that takes a transpose.

    What is elementwise and read here alone is computed in that order, where its own operands can be.
    """
    if variable.val is not None:
        value = np.asarray(variable.val)
        if not value.ndim:
            return value
        return np.ascontiguousarray(value.reshape((1,) * (len(order) - value.ndim) + value.shape).transpose(order))
    if not variable.rank:
        return variable
    found = _view(variable, order, len(order))
    return _remade(variable, order, before) if found is None else views.write(*found, before)


def _remade(variable: Any, order: Order, before: Any) -> Any | None:
    operation = variable.op
    if operation is None or operation.op_type not in arithmetic.ELEMENTWISE or len(set(variable.child_ops)) != 1:
        return None
    put = {name: _put(each, order, before) for name, each in _given(operation).items()}
    return None if any(each is None for each in put.values()) else _built(operation, put, before)


def _given(operation: Any) -> dict[str, Any]:
    return {name: operation.inputs[name] for name in _OPERANDS if operation.inputs.get(name) is not None}


def _inverse(order: Order) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


def _computed(operation: Any, operands: dict[str, Any]) -> Turned | None:
    """The operator itself on its operands as they lie; its axes are those of its widest operand."""
    computed = [each for each in operands.values() if each.val is None]
    rank = max(each.rank for each in operands.values())
    order = next((found for each in computed if each.rank == rank and (found := lies(each)) is not None), None)
    if order is None:
        return None
    put = {name: _put(each, order, operation) for name, each in operands.items()}
    if any(each is None for each in put.values()):
        return None
    for name in {"axis", "axes"} & set(operation.inputs):
        places = [order.index(int(axis) % rank) for axis in np.atleast_1d(operation.inputs[name].val)]
        put[name] = np.int32(places[0]) if name == "axis" else np.array(places, np.int32)
    if "keep_dims" in operation.inputs:
        put["keep_dims"] = True
    return Turned(_built(operation, put, operation), _inverse(order))


def _built(operation: Any, given: dict[str, Any], before: Any) -> Any:
    """The operator with some of its inputs exchanged."""
    from coremltools.converters.mil.mil import Builder

    kept = {name: each for name, each in operation.inputs.items() if each is not None}
    return getattr(Builder, operation.op_type)(**kept | given, before_op=before)


def _elementwise(operation: Any) -> Turned | None:
    return _computed(operation, _given(operation))


def _along(operation: Any) -> Turned | None:
    along = operation.inputs.get("axes") or operation.inputs.get("axis")
    if along is None or along.val is None or (operation.op_type == "layer_norm" and np.size(along.val) != 1):
        return None
    return _computed(operation, {"x": operation.inputs["x"]})


def _concat(operation: Any) -> Turned | None:
    from coremltools.converters.mil.mil import Builder

    values, interleave = operation.inputs["values"], operation.inputs.get("interleave")
    if interleave is not None and interleave.val:
        return None
    order = next((found for each in values if each.val is None and (found := lies(each)) is not None), None)
    if order is None and all(_is_column(each) for each in values):
        order = _swap(values[0].rank)  # columns side by side lie one below the other, whole
    if order is None:
        return None
    parts = [_put(each, order, operation) for each in values]
    if any(each is None for each in parts):
        return None
    axis = order.index(int(operation.inputs["axis"].val) % len(order))
    return Turned(Builder.concat(values=parts, axis=axis, before_op=operation), _inverse(order))


def _is_column(variable: Any) -> bool:
    return bool(variable.rank == 4 and variable.shape[-1] == 1 < variable.shape[-2])


def _pad(operation: Any) -> Turned | None:
    from coremltools.converters.mil.mil import Builder

    x, amounts = operation.inputs["x"], operation.inputs["pad"]
    order = lies(x)
    if order is None or amounts.val is None or operation.inputs["mode"].val != "constant":
        return None
    pairs = np.zeros((x.rank, 2), np.int32)
    pairs[x.rank - len(amounts.val) // 2 :] = amounts.val.reshape(-1, 2)
    made = Builder.pad(
        x=_put(x, order, operation), pad=pairs[list(order)].flatten(), mode="constant",
        constant_val=operation.inputs["constant_val"], before_op=operation,
    )  # fmt: skip
    return Turned(made, _inverse(order))


def _product(operation: Any) -> Turned | None:
    from coremltools.converters.mil.mil import Builder

    x, y = operation.inputs["x"], operation.inputs["y"]
    if min(x.rank, y.rank) < 2:
        return None
    swaps = {name: _swapped(operation.inputs[name], operation) for name in ("x", "y")}
    if all(each is None for each in swaps.values()):
        return None
    left, right = (operation.inputs[name] if swaps[name] is None else swaps[name] for name in ("x", "y"))
    turned_left = views.flag(operation, "transpose_x") != (swaps["x"] is not None)
    turned_right = views.flag(operation, "transpose_y") != (swaps["y"] is not None)
    rank = operation.outputs[0].rank
    if swaps["x"] is not None and turned_left:
        made = Builder.matmul(x=right, y=left, transpose_x=not turned_right, transpose_y=False, before_op=operation)
        return Turned(made, _swap(rank))
    made = Builder.matmul(x=left, y=right, transpose_x=turned_left, transpose_y=turned_right, before_op=operation)
    return Turned(made, range(rank))


def _swapped(operand: Any, before: Any) -> Any | None:
    """The operand with its last two axes exchanged, where that is how it lies."""
    order = _swap(operand.rank)
    return _put(operand, order, before) if lies(operand) == order else None


def _swap(rank: int) -> Order:
    return (*range(rank - 2), rank - 1, rank - 2)


RULES: dict[str, Callable[[Any], Turned | None]] = {
    **dict.fromkeys(("select", "cast", *arithmetic.ELEMENTWISE), _elementwise),
    **dict.fromkeys(("softmax", "layer_norm", *arithmetic.REDUCTIONS), _along),
    "concat": _concat,
    "pad": _pad,
    "matmul": _product,
}
