"""softmax(Q K^T) V head by head, with the tokens last: K^T Q, a softmax over the keys, and V times the shares.

As in Apple's reference (Deploying Transformers on the Apple Neural Engine, 2022) heads are slices of channels, so that
no tensor has five axes, and all is computed as [channels, tokens], as convolutions leave it. The reference transposes
the keys before its product; here the product itself reads them so, and no copy is asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnrewrite.targets.coreml.passes import views

MOST_HEADS = 64


@dataclass(frozen=True)
class Operand:
    """A query, key or value [batch, heads, tokens, channels]: places in `base`, times `factor`."""

    base: Any
    index: Tensor
    factor: float


@dataclass(frozen=True)
class Attention:
    """One attention: its operands, and what is done to the scores, in order: a factor, or a constant added."""

    query: Operand
    key: Operand
    value: Operand
    steps: tuple[tuple[str, np.ndarray], ...]
    last: Any


def apply(block: Any) -> int:
    """Write every attention that is understood head by head; how many."""
    edits = 0
    for operation in list(block.operations):
        if operation.op_type == "softmax":
            found = _match(operation)
            edits += found is not None and _written(found, block)
    return edits


def _match(softmax: Any) -> Attention | None:
    steps: list[tuple[str, np.ndarray]] = []
    scores = softmax.inputs["x"]
    rank = scores.rank
    if rank not in (3, 4) or not views.is_static(scores) or int(softmax.inputs["axis"].val) % rank != rank - 1:
        return None
    while scores.op is not None and scores.op.op_type in ("mul", "real_div", "add", "sub"):
        step = _step(scores.op, rank)
        if step is None or len(scores.child_ops) != 1:
            return None
        steps.insert(0, step)
        scores = scores.op.inputs["x"] if scores.op.inputs["x"].val is None else scores.op.inputs["y"]
    readers = softmax.outputs[0].child_ops
    if scores.op is None or scores.op.op_type != "matmul" or len(readers) != 1 or len(scores.child_ops) != 1:
        return None
    first, last = scores.op, readers[0]
    if last.op_type != "matmul" or last.inputs["x"] is not softmax.outputs[0] or views.flag(last, "transpose_x"):
        return None
    query = _operand(first.inputs["x"], turned=views.flag(first, "transpose_x"))
    key = _operand(first.inputs["y"], turned=not views.flag(first, "transpose_y"))
    value = _operand(last.inputs["y"], turned=views.flag(last, "transpose_y"))
    if query is None or key is None or value is None:
        return None
    heads = query.index.shape[:2]
    if heads != key.index.shape[:2] or heads != value.index.shape[:2] or heads[1] > MOST_HEADS:
        return None
    return Attention(query, key, value, tuple(steps), last)


def _step(operation: Any, rank: int) -> tuple[str, np.ndarray] | None:
    """What an operator does to the scores with a constant; None where it is no constant, or has other axes."""
    x, y = operation.inputs["x"], operation.inputs["y"]
    if y.val is None and operation.op_type in ("real_div", "sub"):
        return None
    value = y.val if y.val is not None else x.val
    if value is None or np.ndim(value) > rank:
        return None
    whole = np.asarray(value).reshape((1,) * (rank - np.ndim(value)) + np.shape(value))
    value = whole if rank == 4 else whole[None]
    if operation.op_type in ("mul", "real_div"):
        return ("mul", value if operation.op_type == "mul" else 1 / value) if value.size == 1 else None
    return "add", value if operation.op_type == "add" else -value


def _operand(variable: Any, *, turned: bool) -> Operand | None:
    """Where an operand's elements come from, through movement and multiplication by a number."""
    factor, seen = 1.0, variable
    index: Tensor | None = None
    while True:
        found = views.origin(seen, lambda each: each.op is None or each.op.op_type not in views.MOVES)
        if found is None:
            return None
        index = found.index if index is None else found.index.flatten()[index]
        number = _factor(found.base)
        if number is None:
            break
        seen, factor = number[0], factor * number[1]
    if index.dim() == 3:
        index = index[None]
    if index.dim() != 4:
        return None
    return Operand(found.base, index.transpose(2, 3) if turned else index, factor)


def _factor(variable: Any) -> tuple[Any, float] | None:
    """What a variable is a multiple of, and by how much."""
    if variable.op is None or variable.op.op_type != "mul":
        return None
    x, y = variable.op.inputs["x"], variable.op.inputs["y"]
    number, other = (y.val, x) if y.val is not None else (x.val, y)
    if number is None or np.size(number) != 1 or other.val is not None or other.shape != variable.shape:
        return None
    return other, float(np.reshape(number, ()))


def _written(found: Attention, block: Any) -> bool:
    from coremltools.converters.mil.mil import Builder

    last = found.last
    heads = _operands(found)
    if heads is None:
        return False
    parts = []
    for head, (query, key, value) in enumerate(zip(*heads, strict=True)):
        scores = Builder.matmul(x=key, y=query, transpose_x=True, transpose_y=False, before_op=last)
        shares = Builder.softmax(x=_stepped(scores, found, head), axis=2, before_op=last)
        parts.append(Builder.matmul(x=value, y=shares, transpose_x=False, transpose_y=False, before_op=last))
    whole = parts[0] if len(parts) == 1 else Builder.concat(values=parts, axis=1, before_op=last)
    output = last.outputs[0]
    made = views.reshaped(views.transposed(whole, (0, 1, 3, 2), last), output.shape, last)
    return bool(block.try_replace_uses_of_var_after_op(anchor_op=last, old_var=output, new_var=made))


def _operands(found: Attention) -> list[list[Any]] | None:
    """The heads of the queries, of the keys and of the values, each [batch, 1, channels, tokens]."""
    operands = (found.query, found.key, found.value)
    packed = _packed(operands, found.last)
    made = []
    for number, operand in enumerate(operands):
        count = operand.index.shape[1]
        whole, begin = (packed, number * count) if packed is not None else (_all_heads(operand, found.last), 0)
        if whole is None:
            return None
        if operand.factor != 1.0:
            whole, begin = _scaled(_part(whole, begin, count, found.last), operand.factor, found.last), 0
        made.append([_part(whole, begin + head, 1, found.last) for head in range(count)])
    return made


def _packed(operands: Sequence[Operand], before: Any) -> Any | None:
    """All heads of one packed projection, moved at once."""
    base = operands[0].base
    if any(each.base is not base or each.index.shape != operands[0].index.shape for each in operands):
        return None
    seen = views.view(torch.cat([each.index for each in operands], 1).transpose(2, 3))
    return None if seen is None else views.write(seen, base, before)


def _all_heads(operand: Operand, before: Any) -> Any | None:
    """[batch, heads, channels, tokens] of an operand."""
    seen = views.view(operand.index.transpose(2, 3))
    return None if seen is None else views.write(seen, operand.base, before)


def _scaled(variable: Any, factor: float, before: Any) -> Any:
    from coremltools.converters.mil.mil import Builder, types

    # A program that was saved already computes in float16.
    return Builder.mul(x=variable, y=types.nptype_from_builtin(variable.dtype)(factor), before_op=before)


def _part(variable: Any, begin: int, count: int, before: Any) -> Any:
    """[batch, count, channels, tokens] of some heads."""
    from coremltools.converters.mil.mil import Builder

    batch, heads, *rest = variable.shape
    if heads == count:
        return variable
    end = [batch, begin + count, *rest]
    return Builder.slice_by_index(x=variable, begin=[0, begin, 0, 0], end=end, before_op=before)


def _stepped(scores: Any, found: Attention, head: int) -> Any:
    """The scores [batch, 1, keys, queries] of one head with the factors and constants of the original."""
    from coremltools.converters.mil.mil import Builder

    for kind, value in found.steps:
        own = value[:, head % value.shape[1] : head % value.shape[1] + 1]  # [batch or 1, 1, queries or 1, keys or 1]
        given = np.ascontiguousarray(own.transpose(0, 1, 3, 2)) if math.prod(own.shape) > 1 else own.reshape(())
        scores = getattr(Builder, kind)(x=scores, y=given, before_op=found.last)
    return scores
