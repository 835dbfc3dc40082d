"""Chains of data movement read as one strided view, and written again in few operators of low rank.

Reshapes, transposes, slices and splits only say which element goes where. An index tensor pushed through a chain tells
that for any spelling; where it is an offset and strides, the chain is a slice, a transpose and a reshape.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnrewrite.targets.coreml.operators import movement

MOVES = ("reshape", "transpose", "squeeze", "expand_dims", "slice_by_index", "split", "identity")
RANK = 5  # Core ML's most
WIDEST = 16384  # that the Neural Engine takes as a height or a width
Var = Any  # coremltools' variable


@dataclass(frozen=True)
class Origin:
    """Where the elements of a variable come from: flat places in `base`, in the variable's own shape."""

    base: Var
    index: Tensor


@dataclass(frozen=True)
class View:
    """Elements of a tensor at `offset` plus a multiple of each stride, in the order of the axes, as `shape`.

    `axes` are (size, stride), without those of size one; neighbours that run on from each other are one.
    """

    offset: int
    axes: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]


def drop_unread(block: Any) -> None:
    """Remove what passes left behind: it would count as a reader of what it reads."""
    for operation in reversed(list(block.operations)):
        if not any(each.child_ops or each.consuming_blocks for each in operation.outputs):
            operation.remove_from_block()


def is_static(variable: Var) -> bool:
    return all(isinstance(size, (int, np.integer)) for size in variable.shape)


def origin(variable: Var, is_base: Callable[[Var], bool]) -> Origin | None:
    """The nearest ancestor through data movement alone for which `is_base` holds; None without one."""
    chain: list[tuple[Any, int]] = []
    while not is_base(variable):
        operation = variable.op
        if operation is None or operation.op_type not in MOVES or not is_static(variable):
            return None
        chain.append((operation, [output.name for output in operation.outputs].index(variable.name)))
        variable = operation.inputs["x"]
    if not is_static(variable) or variable.val is not None:
        return None
    index = torch.arange(math.prod(variable.shape)).reshape(tuple(variable.shape))
    for operation, place in reversed(chain):
        moved = _moved(operation, index)
        index = moved[place] if isinstance(moved, (list, tuple)) else moved
    return Origin(variable, index)


def unmoved(variable: Var) -> Origin | None:
    """Where a variable comes from in what computed it, before all movement; None where that cannot be followed."""
    return origin(variable, lambda each: each.op is None or each.op.op_type not in MOVES)


def flag(operation: Any, name: str) -> bool:
    """Whether an input of an operator that is true or false, such as `transpose_x`, is given as true."""
    return operation.inputs.get(name) is not None and bool(operation.inputs[name].val)


def _moved(operation: Any, index: Tensor) -> Any:
    given = {
        name: torch.from_numpy(np.array(variable.val))
        for name, variable in operation.inputs.items()
        if variable is not None and name != "x"
    }
    return index if operation.op_type == "identity" else movement.OPERATORS[operation.op_type](x=index, **given)


def view(index: Tensor) -> View | None:
    """The index tensor as offset and strides; None where it is none, as for a roll or a gather."""
    if index.numel() == 0:
        return None
    flat = index.flatten()
    axes = _strides(flat)
    return None if axes is None else View(int(flat[0]), tuple(axes), tuple(index.shape))


def _strides(line: Tensor) -> list[tuple[int, int]] | None:
    """Places as nested (size, stride), the outermost first, whatever shape they are to have."""
    if len(line) == 1:
        return []
    steps = line.diff()
    step = int(steps[0])
    other = (steps != step).nonzero()
    run = int(other[0]) + 1 if len(other) else len(line)
    starts = line[::run]
    if step <= 0 or len(line) % run or not torch.equal(line, (starts[:, None] + step * torch.arange(run)).flatten()):
        return None
    outer = _strides(starts)
    return None if outer is None else [*outer, (run, step)]


def write(wanted: View, base: Var, before: Any) -> Var | None:
    """Operators that make `wanted` of `base`, each of rank 5 at most; None where a slice cannot say it."""
    places = _places(wanted, math.prod(base.shape))
    if places is None:
        return None
    kept = _sliced(places, base, before)
    by_stride = sorted(wanted.axes, key=lambda axis: -axis[1])
    order = [by_stride.index(axis) for axis in wanted.axes]
    return reshaped(_permuted(kept, [size for size, _ in by_stride], order, wanted.shape, before), wanted.shape, before)


def reshaped(variable: Var, shape: Sequence[int], before: Any) -> Var:
    from coremltools.converters.mil.mil import Builder

    if tuple(variable.shape) == tuple(shape):
        return variable
    again = _again(variable, "reshape", "shape", shape, before)
    return again or Builder.reshape(x=variable, shape=np.array(shape, np.int32), before_op=before)


def transposed(variable: Var, order: Sequence[int], before: Any) -> Var:
    from coremltools.converters.mil.mil import Builder

    if list(order) == sorted(order):
        return variable
    long = [axis for axis in order if variable.shape[axis] != 1]
    if long == sorted(long) and is_static(variable):
        return reshaped(variable, [variable.shape[axis] for axis in order], before)
    again = _again(variable, "transpose", "perm", order, before)
    return again or Builder.transpose(x=variable, perm=np.array(order, np.int32), before_op=before)


def _again(variable: Var, kind: str, name: str, value: Sequence[int], before: Any) -> Var | None:
    """What such an operator, which stands before already, makes of the variable."""
    found = [
        each for each in variable.child_ops if each.op_type == kind and np.array_equal(each.inputs[name].val, value)
    ]
    if not found:
        return None
    earlier = set(map(id, takewhile(lambda each: each is not before, before.enclosing_block.operations)))
    return next((each.outputs[0] for each in found if id(each) in earlier), None)


@dataclass(frozen=True)
class _Range:
    """Part of an axis: `size` from `begin` on, of `whole`."""

    whole: int
    begin: int
    size: int


def _places(wanted: View, total: int) -> list[_Range] | None:
    """The view as a part of each axis of a reshaped tensor, the axes from the widest stride to the narrowest."""
    ranges = []
    left, offset = total, wanted.offset
    for size, stride in [*sorted(wanted.axes, key=lambda axis: -axis[1]), (1, 1)]:
        if left % stride:
            return None
        whole, begin = left // stride, offset // stride
        if begin + size > whole:
            return None
        ranges.append(_Range(whole, begin, size))
        left, offset = stride, offset - begin * stride
    return ranges


def _sliced(places: Sequence[_Range], base: Var, before: Any) -> Var:
    """`base` cut down to the elements of the view, in their order."""
    if all(each.size == each.whole for each in places):
        return base
    shape = [each.whole for each in places]
    marked = np.zeros(shape, bool)
    marked[tuple(slice(each.begin, each.begin + each.size) for each in places)] = True
    own = _box(marked.reshape(base.shape))
    if own is not None:
        return _cut(base, own, before)
    joined = _joined(places)
    narrow = [part for each in joined for part in _narrow(each)]
    joined = narrow if len(narrow) <= RANK else joined
    return _cut(reshaped(base, [each.whole for each in joined], before), joined, before)


def _joined(places: Sequence[_Range]) -> list[_Range]:
    """The same part of fewer axes: one that is kept whole belongs to the one before it."""
    joined: list[_Range] = []
    for each in places:
        if joined and each.size == each.whole:
            last = joined[-1]
            joined[-1] = _Range(last.whole * each.whole, last.begin * each.whole, last.size * each.whole)
        else:
            joined.append(each)
    return joined


def _narrow(place: _Range) -> list[_Range]:
    """The same part of two axes that the engine takes, where one is too long for it and steps by whole rows."""
    row = math.gcd(place.whole, place.begin, place.size)
    if place.whole <= WIDEST or not place.whole // WIDEST < row <= WIDEST:
        return [place]
    return [_Range(place.whole // row, place.begin // row, place.size // row), _Range(row, 0, row)]


def _box(marked: np.ndarray) -> list[_Range] | None:
    """The range along each axis whose product the marked elements are."""
    ranges = []
    for axis, whole in enumerate(marked.shape):
        along = np.flatnonzero(marked.any(tuple(other for other in range(marked.ndim) if other != axis)))
        ranges.append(_Range(whole, int(along[0]), int(along[-1] - along[0] + 1)))
    return ranges if math.prod(each.size for each in ranges) == marked.sum() else None


def _cut(variable: Var, ranges: Sequence[_Range], before: Any) -> Var:
    from coremltools.converters.mil.mil import Builder

    if all(each.size == each.whole for each in ranges):
        return variable
    begin = np.array([each.begin for each in ranges], np.int32)
    end = np.array([each.begin + each.size for each in ranges], np.int32)
    return Builder.slice_by_index(x=variable, begin=begin, end=end, before_op=before)


def _permuted(variable: Var, sizes: list[int], order: list[int], shape: Sequence[int], before: Any) -> Var:
    """`variable`, whose axes longer than one are `sizes` once split, with them in `order`; in any shape."""
    if order == sorted(order):
        return variable
    long = [axis for axis, size in enumerate(variable.shape) if size > 1]
    if [variable.shape[axis] for axis in long] == sizes:
        return transposed(variable, _whole_order(variable.shape, long, order, shape), before)
    if len(sizes) <= RANK:
        return transposed(reshaped(variable, sizes, before), order, before)
    return _moved_by_blocks(variable, sizes, order, before)


def _whole_order(have: Sequence[int], long: Sequence[int], order: Sequence[int], shape: Sequence[int]) -> list[int]:
    """The order of all axes, those of one too, so that the result is of `shape` where that can be."""
    moved = iter([long[place] for place in order])
    if len(have) != len(shape) or [have[long[place]] for place in order] != [size for size in shape if size > 1]:
        return [next(moved) if axis in long else axis for axis in range(len(have))]
    short = iter([axis for axis in range(len(have)) if axis not in long])
    return [next(moved) if size > 1 else next(short) for size in shape]


def _moved_by_blocks(variable: Var, sizes: list[int], order: list[int], before: Any) -> Var:
    """A permutation of many axes as swaps of neighbouring blocks, each a transpose of rank 4."""
    current = list(range(len(sizes)))
    for place, _ in enumerate(order):
        start = current.index(order[place])
        if start == place:
            continue
        end = start + 1  # what stays together moves together
        while end < len(current) and current[end] == order[place + end - start]:
            end += 1
        blocks = [current[:place], current[place:start], current[start:end], current[end:]]
        parts = [math.prod(sizes[axis] for axis in block) for block in blocks]
        variable = transposed(reshaped(variable, parts, before), (0, 2, 1, 3), before)
        current = [*blocks[0], *blocks[2], *blocks[1], *blocks[3]]
    assert all(one < other for one, other in pairwise(order.index(axis) for axis in current))
    return variable
