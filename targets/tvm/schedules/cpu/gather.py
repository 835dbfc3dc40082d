"""Elements taken from places along an axis that are known as the model is compiled."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnrewrite.errors import Refusal
from attnrewrite.targets.tvm.schedules import graph as relax_graph
from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.function import address, along, each, function, steps
from attnrewrite.targets.tvm.schedules.cpu.vectors import Position
from attnrewrite.targets.tvm.schedules.graph import is_float, shape
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.rule import Argument, Call, Kernel, Rule, Step
from attnrewrite.targets.tvm.schedules.trace import destination
from attnrewrite.targets.tvm.schedules.view import Layout


@dataclass(frozen=True)
class Gather:
    """out[a, i, b] = value[a, places[i], b], for the places along `axis`; the second argument holds them."""

    value: Layout
    out: Layout
    axis: int
    name: str = "take"

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        lead, inner = self.out.shape[: self.axis], self.out.shape[self.axis + 1 :]

        def body(read: Any, places: Any, written: Any) -> None:
            def move(index: Sequence[Position], place: Position, after: Sequence[Position], lanes: int) -> None:
                source = address(self.value, (*index[:-1], place, *after))
                found = vectors.load(read, source, lanes, self.value.strides[-1])
                vectors.store(written, address(self.out, (*index, *after)), found, lanes, self.out.strides[-1])

            if math.prod(inner) > 1:
                with each((*lead, self.out.shape[self.axis]), self.out.size) as index:
                    place = vectors.name(places[index[-1]])
                    along(inner, profile.lanes, lambda after, _, lanes: move(index, place, after, lanes))
                return
            with each(lead, self.out.size) as z, steps(self.out.shape[self.axis]) as at:
                move((*z, at), vectors.name(places[at]), [0] * len(inner), 1)

        return function(arguments, body)


def _apply(call: Call, profile: Profile) -> Kernel | Refusal:
    source, out, passed = destination(call.graph, call.var)
    take = call.graph.call(source, "relax.take")
    if take is None:
        return Refusal("other-operator", "takes nothing from places")
    if not is_float(take.args[0]):
        return Refusal("dtype", "takes what is not float32")
    indices = call.graph.value(take.args[1])
    if not relax_graph.is_constant(indices):
        return Refusal("indices", "takes from places that are known only as it runs")
    places = np.asarray(indices.value.numpy()).astype(np.int32).reshape(-1)
    view = call.graph.view(take.args[0])
    axis = 0 if take.attrs.axis is None else int(take.attrs.axis) % len(view.layout.shape)
    size = view.layout.shape[axis]
    if (places < -size).any() or (places >= size).any():
        return Refusal("indices", "takes from beyond the end")
    written = out.reshape((*view.layout.shape[:axis], places.size, *view.layout.shape[axis + 1 :]))
    if written is None:
        return Refusal("layout", "writes what it takes where no strides describe it")
    kernel = Gather(view.layout, written, axis)
    step = Step(kernel, (view.base, np.where(places < 0, places + size, places)), shape(call.var))
    return Kernel((step,), (*passed, source))


TAKE = Rule("take", _apply)
