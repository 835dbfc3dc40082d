"""An imported Relax module, read: its one dataflow block as definitions, uses, constants and views."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import tvm
from tvm import relax

from attnrewrite.targets.tvm.schedules.profile import FLOAT32
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, View, contiguous

# A cast from float32 to itself moves nothing, and so does none of the others in memory.
RESHAPES = ("relax.reshape", "relax.squeeze", "relax.expand_dims", "relax.flatten", "relax.astype")
MOVEMENT = (*RESHAPES, "relax.permute_dims", "relax.broadcast_to", "relax.strided_slice")


class Graph:
    """The values of `main` by variable. Reads only."""

    def __init__(self, module: Any) -> None:
        self.main = module["main"]
        (self.block,) = self.main.body.blocks
        self.definitions = {binding.var: binding.value for binding in self.block.bindings}
        self.uses: dict[Any, int] = {}
        for expression in (*self.definitions.values(), self.main.body.body):
            for var in variables(expression):
                self.uses[var] = self.uses.get(var, 0) + 1

    def value(self, expression: Any) -> Any:
        """What a variable is bound to, through other variables; anything else is its own value."""
        while isinstance(expression, relax.Var) and expression in self.definitions:
            bound = self.definitions[expression]
            if not isinstance(bound, relax.Var):
                return bound
            expression = bound
        return expression

    def call(self, expression: Any, *operators: str) -> Any | None:
        """The call of an operator that an expression is, of one of `operators` where any are given, or None."""
        value = self.value(expression)
        if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
            return None
        return value if not operators or value.op.name in operators else None

    def operator(self, var: Any) -> str:
        """The name of the operator that a value comes from."""
        value = self.value(var)
        if isinstance(value, relax.TupleGetItem):
            return self.operator(value.tuple_value)
        call = self.call(value)
        return type(value).__name__ if call is None else str(call.op.name).removeprefix("relax.")

    def is_sole(self, var: Any) -> bool:
        """Whether a variable of the block is read once."""
        return isinstance(var, relax.Var) and self.uses.get(var) == 1

    def constant(self, expression: Any) -> np.ndarray | None:
        """The value of whatever is a constant, or a view of one."""
        if not is_float(expression):
            return None
        view = self.view(expression)
        if not isinstance(view.base, np.ndarray):
            return None
        return strided(view.base, view.layout)

    def number(self, expression: Any) -> float | None:
        """The value of a constant with a single element, or of a number among an operator's arguments."""
        if isinstance(expression, tvm.tirx.FloatImm | tvm.tirx.IntImm):
            return float(expression.value)
        if not isinstance(expression, relax.Var) and not is_constant(expression):
            return None
        value = self.constant(expression) if is_float(expression) else None
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def view(self, expression: Any) -> View:
        """A value as a view of the nearest one that has to exist: a call's result, an argument, a constant."""
        value = self.value(expression)
        if is_constant(value):
            array = value.value.numpy()
            return View(array, contiguous(array.shape))
        view = self._through_tuple(value) if isinstance(value, relax.TupleGetItem) else self._through_call(value)
        if view is None:
            return View(expression, contiguous(shape(expression)), self.uses.get(expression, 1) == 1)
        return View(view.base, view.layout, view.sole and self.uses.get(expression, 1) == 1)

    def _through_tuple(self, item: Any) -> View | None:
        source = self.value(item.tuple_value)
        if isinstance(source, relax.Tuple):
            return self.view(source.fields[item.index])
        split = self.call(source, "relax.split")
        if split is None or not is_float(split.args[0]):
            return None
        whole, parts = shape(split.args[0]), split.attrs.indices_or_sections
        axis = int(split.attrs.axis) % len(whole)
        if isinstance(parts, int | tvm.tirx.IntImm):
            length = -(-whole[axis] // int(parts))
            cuts = [length * index for index in range(int(parts))]
        else:
            cuts = [0, *integers(parts)]
        begin, end = cuts[item.index], [*cuts[1:], whole[axis]][item.index]
        view = self.view(split.args[0])
        return View(view.base, view.layout.narrow(axis, begin, end - begin), sole=False)

    def _through_call(self, value: Any) -> View | None:
        call = self.call(value, *MOVEMENT)
        if call is None or not is_float(call.args[0]):
            return None
        view = self.view(call.args[0])
        layout = movement(call, view.layout)
        return None if layout is None else View(view.base, layout, view.sole)


def movement(call: Any, layout: Layout) -> Layout | None:
    """What an operator that only moves data makes of the layout of its operand; None where that is no layout."""
    name, result = call.op.name, shape(call)
    if name in RESHAPES:
        return layout.reshape(result)
    if name == "relax.permute_dims":
        return layout.permute(permutation(call))
    if name == "relax.broadcast_to":
        return layout.expand(result)
    axes, begins, _, *strides = (integers(argument.fields) for argument in call.args[1:])
    steps = strides[0] if strides else [1] * len(axes)
    for axis, begin, step in zip(axes, begins, steps, strict=True):
        if step < 1:
            return None
        axis, size = axis % len(result), layout.shape[axis]
        start = min(max(begin + size if begin < 0 else begin, 0), size)
        layout = layout.narrow(axis, start, result[axis], step)
    return layout


def moved_back(call: Any, layout: Layout) -> Layout | None:
    """The layout of an operand that is only moved, where `layout` is that of the result; None where it is none."""
    if call.op.name in RESHAPES:
        return layout.reshape(shape(call.args[0]))
    if call.op.name == "relax.permute_dims":
        axes = [axis % len(layout.shape) for axis in permutation(call)]
        return layout.permute([axes.index(axis) for axis in range(len(axes))])
    return None


def permutation(call: Any) -> list[int]:
    axes = call.attrs.axes
    return list(reversed(range(len(shape(call))))) if axes is None else integers(axes)


def strided(array: np.ndarray, layout: Layout) -> np.ndarray:
    """The elements of a contiguous array that a layout over it names."""
    flat = array.reshape(-1)
    strides = [stride * array.itemsize for stride in layout.strides]
    return np.lib.stride_tricks.as_strided(flat[layout.offset :], layout.shape, strides)


def variables(expression: Any) -> Iterator[Any]:
    """The variables that an expression reads, one time for each reading."""
    if isinstance(expression, relax.Var):
        yield expression
    elif isinstance(expression, relax.Tuple):
        for field in expression.fields:
            yield from variables(field)
    elif isinstance(expression, relax.TupleGetItem):
        yield from variables(expression.tuple_value)
    elif isinstance(expression, relax.Call):
        for argument in expression.args:
            yield from variables(argument)


def same(one: Any, other: Any) -> bool:
    """Whether two bases of views are one tensor."""
    if isinstance(one, relax.Var) and isinstance(other, relax.Var):
        return bool(one.same_as(other))
    return one is other


def is_constant(expression: Any) -> bool:
    return isinstance(expression, tvm.ir.expr.GenericConst)


def is_float(expression: Any) -> bool:
    """Whether an expression is a tensor of float32 whose shape is known."""
    ty = expression.ty
    if not isinstance(ty, relax.TensorType) or ty.shape is None or str(ty.dtype) != FLOAT32:
        return False
    return all(isinstance(size, tvm.tirx.IntImm) for size in getattr(ty.shape, "values", [None]))


def shape(expression: Any) -> Shape:
    return tuple(int(size) for size in expression.ty.shape.values)


def integers(values: Any) -> list[int]:
    return [int(getattr(value, "value", value)) for value in values]


def multiply_adds(graph: Graph, var: Any) -> int:
    """How many multiply-adds the operator of a value makes: products and convolutions do, nothing else counts."""
    call = graph.call(var, "relax.matmul", "relax.nn.conv2d", "relax.nn.conv1d")
    if call is None:
        return 0
    depth = shape(call.args[0])[-1] if call.op.name == "relax.matmul" else math.prod(shape(call.args[1])[1:])
    return math.prod(shape(call)) * depth
