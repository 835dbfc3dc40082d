"""ONNX operators as torch functions: those that move elements, or make them of sizes alone."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from attnrewrite.frontends.onnx.call import Call, torch_dtype
from attnrewrite.patterns.onnx.written_parts import box_of


def _reshape(call: Call) -> Node:
    """To the known size; one axis that follows the batch is left to torch."""
    size = call.size()
    open_axes = [axis for axis, length in enumerate(size) if isinstance(length, Node)]
    if len(open_axes) == 1 and 0 not in size:
        size[open_axes[0]] = -1
    return call.emit(torch.reshape, call.operand(0), size)


def _unsqueeze(call: Call) -> Node:
    """Axes of one added by their places, which a size alone would leave open where the batch is one."""
    axes = _axes_named(call)
    if axes is None:
        return _reshape(call)
    made = call.operand(0)
    for axis in sorted(axis % len(call.result()) for axis in axes):
        made = call.emit(torch.unsqueeze, made, axis)
    return made


def _squeeze(call: Call) -> Node:
    axes = _axes_named(call)
    return _reshape(call) if axes is None else call.emit(torch.squeeze, call.operand(0), tuple(axes))


def _axes_named(call: Call) -> list[int] | None:
    """The axes that a node names, where it names any that are known."""
    if not call.has(1):
        return call.attribute("axes")
    return call.whole_numbers(1) if call.importer.is_constant(call.name(1)) else None


def _transpose(call: Call) -> Node:
    rank = len(call.shape(0))
    return call.emit(torch.permute, call.operand(0), list(call.attribute("perm", range(rank - 1, -1, -1))))


def _expand(call: Call) -> Node:
    return call.emit(Tensor.expand, call.operand(0), call.size())


def _tile(call: Call) -> Node:
    before, after = call.shape(0), call.size()
    axes = call.importer.view.batch_axes(call.name(0))
    repeats: list[Any] = []
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        if isinstance(new, Node) and axis not in axes:
            repeats.append(new if old == 1 else call.emit(operator.floordiv, new, old))
        else:
            repeats.append(call.result()[axis] // max(old, 1))
    return call.emit(Tensor.repeat, call.operand(0), repeats)


def _slice(call: Call) -> Node:
    if call.opset < 10:
        starts, ends = list(call.attribute("starts")), list(call.attribute("ends"))
        axes, steps = list(call.attribute("axes", range(len(starts)))), [1] * len(starts)
    else:
        starts, ends = call.whole_numbers(1), call.whole_numbers(2)
        axes = call.whole_numbers(3) if call.has(3) else list(range(len(starts)))
        steps = call.whole_numbers(4) if call.has(4) else [1] * len(starts)
    value, shape = call.operand(0), call.shape(0)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 0:
            if start not in (-1, shape[axis] - 1, np.iinfo(np.int64).max) or step != -1 or end >= -shape[axis]:
                raise call.unsupported("it walks backwards over part of an axis")
            value = call.emit(torch.flip, value, [axis % len(shape)])
        else:
            last = None if end >= min(shape[axis], np.iinfo(np.int32).max) else end
            value = call.emit(torch.ops.aten.slice.Tensor, value, axis % len(shape), start, last, step)
    return value


def _split(call: Call) -> list[Node]:
    axis = call.axis(0)
    sizes = [call.result(place)[axis] for place in range(len(call.node.outputs))]
    parts = call.emit(torch.split, call.operand(0), sizes, axis)
    return [call.emit(operator.getitem, parts, place) for place in range(len(sizes))]


def _concat(call: Call) -> Node:
    """Exporters write a roll as the parts from a place on and before it."""
    axis, parts = call.axis(0), call.operands()
    if len(parts) == 2 and all(_is_slice(part) for part in parts):
        value, _, place, *_ = parts[0].args
        whole = [part.args for part in parts] == [(value, axis, place, None, 1), (value, axis, 0, place, 1)]
        if whole and abs(place) <= call.result()[axis]:
            return call.emit(torch.roll, value, -place, axis)
    return call.emit(torch.cat, parts, axis)


def _is_slice(value: Any) -> bool:
    return isinstance(value, Node) and value.target is torch.ops.aten.slice.Tensor


def _gather(call: Call) -> Node:
    axis = call.axis(0)
    if not call.is_settled(1):
        plain = len(call.shape(1)) == 1
        flat = call.operand(1) if plain else call.emit(torch.reshape, call.operand(1), [-1])
        taken = call.emit(torch.index_select, call.operand(0), axis, flat)
        return taken if plain else _reshaped(call, taken)
    indices = call.numbers(1).astype(np.int64) % call.shape(0)[axis]
    first = int(indices.reshape(-1)[0]) if indices.size else 0
    if indices.ndim == 0:
        return call.emit(torch.select, call.operand(0), axis, first)
    if indices.size == 1:
        taken = call.emit(
            torch.ops.aten.slice.Tensor, call.operand(0), axis, int(indices.reshape(())), int(indices.reshape(())) + 1
        )
    else:
        flat = call.importer.buffer(indices.reshape(-1), f"{call.node.outputs[0].name}_indices")
        taken = call.emit(torch.index_select, call.operand(0), axis, flat)
    return taken if indices.ndim == 1 else _reshaped(call, taken)


def _reshaped(call: Call, value: Node) -> Node:
    size = call.size()
    open_axes = [axis for axis, length in enumerate(size) if isinstance(length, Node)]
    if len(open_axes) == 1:
        size[open_axes[0]] = -1
    return call.emit(torch.reshape, value, size)


def _gather_elements(call: Call) -> Node:
    return call.emit(torch.gather, call.operand(0), call.axis(0), call.operand(1))


def gather_nd(data: Tensor, indices: Tensor) -> Tensor:
    return data[tuple(indices.unbind(-1))]


def scatter_nd(data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return torch.index_put(data, tuple(indices.unbind(-1)), updates)


def _gather_nd(call: Call) -> Node:
    if call.attribute("batch_dims", 0):
        raise call.unsupported("it has batch_dims")
    return call.emit(gather_nd, call.operand(0), call.operand(1))


def _scatter_nd(call: Call) -> Node:
    if call.attribute("reduction", "none") != "none":
        raise call.unsupported("it reduces")
    box = box_of(call.numbers(1), call.shape(0)) if call.is_settled(1) else None
    if box is None:
        return call.emit(scatter_nd, call.operand(0), call.operand(1), call.operand(2))
    return _written(call, call.operand(0), tuple(box.items()))


def _written(call: Call, data: Node, box: Sequence[tuple[int, range]]) -> Node:
    """`data` with the updates at `box`, as torch writes into slices."""
    if not box:
        return call.operand(2)
    axis, positions = box[0]
    where = (axis, positions.start, positions.stop, positions.step)
    part = call.emit(torch.ops.aten.slice.Tensor, data, *where)
    written = _written(call, part, box[1:])
    return call.emit(torch.ops.aten.slice_scatter.default, data, written, *where)


def _pad(call: Call) -> Node:
    amounts = list(call.attribute("pads")) if call.opset < 11 else call.whole_numbers(1)
    rank = len(call.shape(0))
    axes = call.whole_numbers(3) if call.has(3) else list(range(rank))
    value = float(call.numbers(2).reshape(())) if call.has(2) else call.attribute("value", 0.0)
    around = {axis % rank: (amounts[place], amounts[place + len(axes)]) for place, axis in enumerate(axes)}
    mode = {"edge": "replicate", "reflect": "reflect", "constant": "constant"}.get(call.attribute("mode", "constant"))
    if mode is None:
        raise call.unsupported("its mode is wrap")
    first = min((axis for axis, pair in around.items() if pair != (0, 0)), default=rank)
    flat = [amount for axis in range(rank - 1, first - 1, -1) for amount in around.get(axis, (0, 0))]
    if not flat:
        return call.operand(0)
    return (
        call.emit(F.pad, call.operand(0), flat, mode, value)
        if mode == "constant"
        else call.emit(F.pad, call.operand(0), flat, mode)
    )


def _depth_to_space(call: Call) -> Node:
    block, (_, channels, height, width) = call.attribute("blocksize"), call.shape(0)
    inner = channels // block**2
    depth_first = call.attribute("mode", "DCR") == "DCR"
    split = [-1, block, block, inner, height, width] if depth_first else [-1, inner, block, block, height, width]
    order = [0, 3, 4, 1, 5, 2] if depth_first else [0, 1, 4, 2, 5, 3]
    return _reshaped(call, call.emit(torch.permute, call.emit(torch.reshape, call.operand(0), split), order))


def _space_to_depth(call: Call) -> Node:
    block, (_, channels, height, width) = call.attribute("blocksize"), call.shape(0)
    split = [-1, channels, height // block, block, width // block, block]
    blocks = call.emit(torch.reshape, call.operand(0), split)
    return _reshaped(call, call.emit(torch.permute, blocks, [0, 3, 5, 1, 2, 4]))


def _constant_of_shape(call: Call) -> Node:
    held = call.attribute("value")
    value = 0.0 if held is None else held.numpy().reshape(()).item()
    dtype = torch.float32 if held is None else torch_dtype(int(held.dtype))
    return call.emit(torch.full, call.size(), value, dtype=dtype)


def _range(call: Call) -> Node:
    """Numbers from `start` in steps of `delta`; how many follows from the sizes, as the batch may decide it."""
    start, delta = (call.numbers(place).reshape(()).item() for place in (0, 2))
    dtype = torch_dtype(call.importer.view.dtype(str(call.node.outputs[0].name)))
    counted = call.emit(torch.arange, call.size()[0], dtype=dtype)
    return call.emit(torch.add, call.emit(torch.mul, counted, delta), start)


def _scatter_elements(call: Call) -> Node:
    data, indices, updates = call.operands()
    how = call.attribute("reduction", "none")
    if how not in ("none", "add"):
        raise call.unsupported(f"it reduces by {how}")
    scatter = torch.scatter if how == "none" else torch.scatter_add
    return call.emit(scatter, data, call.axis(0), indices, updates)


def _trilu(call: Call) -> Node:
    diagonal = call.whole_numbers(1)[0] if call.has(1) else 0
    return call.emit(torch.triu if call.attribute("upper", 1) else torch.tril, call.operand(0), diagonal)


MOVES: dict[str, Callable[[Call], Any]] = {
    "Reshape": _reshape, "Flatten": _reshape, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze, "Transpose": _transpose,
    "Expand": _expand, "Tile": _tile, "Slice": _slice, "Split": _split, "Concat": _concat, "Gather": _gather,
    "GatherElements": _gather_elements, "GatherND": _gather_nd, "ScatterND": _scatter_nd, "Pad": _pad,
    "ScatterElements": _scatter_elements, "DepthToSpace": _depth_to_space, "SpaceToDepth": _space_to_depth,
    "ConstantOfShape": _constant_of_shape, "Range": _range, "Trilu": _trilu,
}  # fmt: skip
