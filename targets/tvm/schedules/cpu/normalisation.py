"""Rules for normalisation along rows, and for softmax where it is no part of an attention."""

from typing import Any

from attnrewrite.errors import Refusal
from attnrewrite.targets.tvm.schedules import graph as relax_graph
from attnrewrite.targets.tvm.schedules.cpu.rows import Normalise, Softmax
from attnrewrite.targets.tvm.schedules.expression import Apply, Arguments, Expression, Leaf, Result, moved, ordered
from attnrewrite.targets.tvm.schedules.graph import Graph, shape
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.rule import Call, Kernel, Rule, Step
from attnrewrite.targets.tvm.schedules.trace import destination, operand
from attnrewrite.targets.tvm.schedules.view import Layout, Shape

NORMS = ("relax.nn.layer_norm", "relax.nn.rms_norm")


def _normalise(call: Call, profile: Profile) -> Kernel | Refusal:
    source, out, passed = destination(call.graph, call.var)
    norm = call.graph.call(source, *NORMS)
    if norm is None:
        return Refusal("other-operator", "normalises no rows")
    space, attributes = shape(source), norm.attrs
    axes = [axis % len(space) for axis in relax_graph.integers(attributes.axes)]
    order = (*(axis for axis in range(len(space)) if axis not in axes), *sorted(axes))
    centred = norm.op.name == NORMS[0]
    epilogue: Expression = Result()
    if not centred or attributes.scale:
        epilogue = Apply("multiply", (epilogue, _along(call.graph, norm.args[1], space, axes)))
    if centred and attributes.center:
        epilogue = Apply("add", (epilogue, _along(call.graph, norm.args[2], space, axes)))
    found = operand(call.graph, norm.args[0])
    arguments = Arguments()
    value, after = (ordered(arguments.loading(each), order) for each in (found.expression, epilogue))
    function = Normalise(len(axes), centred, float(attributes.epsilon), value, out.permute(order), after)
    step = Step(function, tuple(arguments.bases), shape(call.var))
    return Kernel((step,), (*passed, source, *found.covers))


def _group_normalise(call: Call, profile: Profile) -> Kernel | Refusal:
    source, out, passed = destination(call.graph, call.var)
    norm = call.graph.call(source, "relax.nn.group_norm")
    if norm is None:
        return Refusal("other-operator", "normalises no groups of channels")
    space, attributes = shape(source), norm.attrs
    batch, channels, *places = space
    groups = int(attributes.num_groups)
    if int(attributes.channel_axis) != 1 or len(attributes.axes) != len(places):
        return Refusal("axes", "normalises groups along other axes than those behind the channels")
    epilogue: Expression = Result()
    if attributes.scale:
        epilogue = Apply("multiply", (epilogue, _along(call.graph, norm.args[1], space, [1])))
    if attributes.center:
        epilogue = Apply("add", (epilogue, _along(call.graph, norm.args[2], space, [1])))
    grouped = (batch, groups, channels // groups, *places)
    found = operand(call.graph, norm.args[0])
    parts = [moved(each, lambda layout: layout.reshape(grouped)) for each in (found.expression, epilogue)]
    written = out.reshape(grouped)
    if written is None or None in parts:
        return Refusal("layout", "normalises groups of what no strides describe")
    arguments = Arguments()
    value, after = (arguments.loading(each) for each in parts if each is not None)
    function = Normalise(len(grouped) - 2, True, float(attributes.epsilon), value, written, after)
    step = Step(function, tuple(arguments.bases), shape(call.var))
    return Kernel((step,), (*passed, source, *found.covers))


def _along(graph: Graph, parameter: Any, space: Shape, axes: list[int]) -> Leaf:
    """A parameter with a value for each index of `axes`, over the whole space."""
    view = graph.view(parameter)
    strides = dict(zip(axes, view.layout.strides, strict=True))
    layout = Layout(space, tuple(strides.get(axis, 0) for axis in range(len(space))), view.layout.offset)
    return Leaf(type(view)(view.base, layout))


def _softmax(call: Call, profile: Profile) -> Kernel | Refusal:
    source, out, passed = destination(call.graph, call.var)
    softmax = call.graph.call(source, "relax.nn.softmax")
    if softmax is None:
        return Refusal("other-operator", "is no softmax")
    rank = len(shape(source))
    axis = int(softmax.attrs.axis) % rank
    order = (*(each for each in range(rank) if each != axis), axis)
    found = operand(call.graph, softmax.args[0])
    arguments = Arguments()
    value = ordered(arguments.loading(found.expression), order)
    function = Softmax(value, out.permute(order), Result())
    return Kernel((Step(function, tuple(arguments.bases), shape(call.var)),), (*passed, source, *found.covers))


NORM = Rule("normalise", _normalise)
GROUP_NORM = Rule("normalise groups", _group_normalise)
SOFTMAX = Rule("softmax", _softmax)
