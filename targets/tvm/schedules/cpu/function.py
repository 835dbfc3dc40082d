"""How a kernel is put together: a TIR function over flat buffers, loops, expressions at a place of an index space."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder import ir as T

from attnrewrite.targets.tvm.schedules.cpu import half, vectors
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position, Value, pieces
from attnrewrite.targets.tvm.schedules.expression import Apply, Expression, Load, Number, Result
from attnrewrite.targets.tvm.schedules.profile import FLOAT16, FLOAT32
from attnrewrite.targets.tvm.schedules.rule import Argument
from attnrewrite.targets.tvm.schedules.view import Layout, unravel

OPAQUE = 8  # TVM's word for a function that must not be fused with others
FIRST_CACHE, SECOND_CACHE = 3, 2  # LLVM's words for where a line is to be kept
ON_STACK = 2**15  # bytes
FEWEST_FOR_THREADS = 4096  # numbers: less work than that is done sooner than another thread wakes up


def function(arguments: Sequence[Argument], body: Callable[..., None]) -> Any:
    """The TIR function of tensors whose statements `body` writes, given each tensor as a flat buffer."""
    with IRBuilder() as builder, T.prim_func(is_private=True, s_tir=True):
        T.func_attr({"tirx.noalias": True, "op_pattern": OPAQUE, "tirx.is_scheduled": True})
        given = [T.arg(f"a{index}", T.buffer(each.shape, each.dtype)) for index, each in enumerate(arguments)]
        # Passes that look at reshapes want to see a block around everything.
        with T.sblock("root"):
            T.reads([])
            T.writes([])
            flat = [
                T.decl_buffer((math.prod(each.shape),), each.dtype, data=buffer.data)
                for each, buffer in zip(arguments, given, strict=True)
            ]
            body(*flat)
    return builder.get()


@contextmanager
def each(shape: Sequence[int], work: int, strides: Sequence[int] | None = None) -> Iterator[list[Position]]:
    """A loop over an index space, on several threads when its `work` (numbers touched) is worth it: the indices.

    The axis with the largest of `strides` is the slowest, where they are given. A thread has indices that follow each
    other.
    """
    count = math.prod(shape)
    if count == 1:
        yield [0] * len(shape)
        return
    order = range(len(shape)) if strides is None else sorted(range(len(shape)), key=lambda axis: -strides[axis])
    loop = T.parallel if work >= FEWEST_FOR_THREADS else T.serial
    with loop(0, count) as flat:
        found = dict(zip(order, unravel([shape[axis] for axis in order]), strict=True))
        places = [found[axis] for axis in range(len(shape))]
        yield [T.bind(flat // step % size) if size > 1 else 0 for step, size in places]


@contextmanager
def steps(count: int) -> Iterator[Position]:
    """A loop on one thread: its index."""
    if count == 1:
        yield 0
        return
    with T.serial(0, count) as index:
        yield index


def by_pairs(count: int, visit: Callable[[Position], None]) -> None:
    """Visit so many indices on one thread, two in a turn of the loop, so that neither waits for the other."""
    if count > 1:
        with steps(count // 2) as pair:
            for i in range(2):
                visit(pair * 2 + i)
    if count % 2:
        visit(count - 1)


def scratch(length: int, dtype: str = FLOAT32) -> Any:
    """A buffer of the thread's own: on the stack up to so many bytes, and in registers where every place is a constant.

    TVM by itself asks the runtime for what takes a kilobyte, each time, and no compiler keeps that in registers.
    """
    on_stack = length * np.dtype(dtype).itemsize <= ON_STACK
    return T.alloc_buffer((length,), dtype, annotations={"disable_lower_builtin": True} if on_stack else None)


def address(layout: Layout, index: Sequence[Position]) -> Position:
    """The place in its buffer of an element of a layout."""
    at: Position = layout.offset
    for position, stride in zip(index, layout.strides, strict=True):
        if stride:
            at = at + position * stride
    return at


def evaluate(
    expression: Expression,
    buffers: Sequence[Any],
    index: Sequence[Position],
    lanes: int,
    result: Value | None = None,
    known: Mapping[Load, Value] | None = None,
    dtype: str = FLOAT32,
) -> Value:
    """An expression at `lanes` neighbouring places of its index space's last axis, from `index` on.

    `result` is what the kernel has computed there; `known` are loads that it has done before. Where the value is to be
    rounded to float16 (`dtype`), its last function is one of float16 numbers, if there is such a one.
    """
    if isinstance(expression, Number):
        return vectors.splat(expression.value, lanes)
    if isinstance(expression, Result):
        assert result is not None
        return result
    if isinstance(expression, Load):
        if known and expression in known:
            return known[expression]
        at = address(expression.layout, index)
        stride = expression.layout.strides[-1]
        return vectors.name(vectors.load(buffers[expression.argument], at, lanes, stride))
    assert isinstance(expression, Apply)
    operands = [evaluate(operand, buffers, index, lanes, result, known) for operand in expression.operands]
    if dtype == FLOAT16 and expression.operation in half.OPERATIONS:
        return half.OPERATIONS[expression.operation](*(vectors.name(vectors.as_type(each, dtype)) for each in operands))
    return vectors.name(vectors.OPERATIONS[expression.operation](*operands))


def write(
    expression: Expression,
    buffers: Sequence[Any],
    out: Layout,
    index: Sequence[Position],
    lanes: int,
    result: Value | None = None,
) -> None:
    """Write an expression's value at `lanes` neighbouring places to where `out` has them in the last of the buffers."""
    written = buffers[-1]
    value = evaluate(expression, buffers, index, lanes, result, dtype=str(written.dtype))
    vectors.store(written, address(out, index), value, lanes, out.strides[-1])


def across(vector: Value, lanes: int, combine: Callable[[Value, Value], Value]) -> Value:
    """All lanes of a vector combined, by halves."""
    held = scratch(lanes)
    vectors.store(held, 0, vector, lanes)
    while lanes > 1:
        lanes //= 2
        halves = (vectors.load(held, 0, lanes), vectors.load(held, lanes, lanes))
        vectors.store(held, 0, combine(*halves), lanes)
    return vectors.name(held[0])


def only_if(condition: Any, then: Callable[[], None]) -> None:
    """Statements for one case of a condition that is known only as the kernel runs."""
    with T.If(condition), T.Then():
        then()


def when(condition: Any, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Statements for either case of a condition that is known only as the kernel runs."""
    with T.If(condition):
        with T.Then():
            then()
        with T.Else():
            otherwise()


def prefetch(buffer: Any, at: Position, cache: int) -> None:
    """Ask for the cache line that holds an element, to be read soon and more than once; beyond the buffer's end, too,
    where nothing comes of it. `cache`: FIRST_CACHE or SECOND_CACHE.
    """
    pointer = T.address_of(buffer[at])
    T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch", pointer, 0, cache, 1))


def along(
    shape: Sequence[int], lanes: int, visit: Callable[[list[Position], Position, int], None], wide: int = 4
) -> None:
    """Visit every element of a row of `shape` by vectors: the index, the place in the row, and the lanes at once.

    `wide` registers are worked on side by side, so that none waits for another; the rest goes by narrower vectors.
    """
    *lead, length = shape
    full, lanes = length // (lanes * wide), lanes * wide

    def line(index: list[Position], begin: Position) -> None:
        if full:
            with steps(full) as vector:
                visit([*index, vector * lanes], begin + vector * lanes, lanes)
        for at, narrower in pieces(length - full * lanes, lanes):
            visit([*index, full * lanes + at], begin + full * lanes + at, narrower)

    if math.prod(lead) == 1:
        line([0] * len(lead), 0)
        return
    with steps(math.prod(lead)) as flat:
        line([flat // step % size if size > 1 else 0 for step, size in unravel(lead)], flat * length)
