"""What leaving out the roundings inside its attention changes in a quantised file, and what it may change."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from attnrewrite.errors import CheckFailedError
from attnrewrite.frontends.onnx.compared import run_each
from attnrewrite.patterns.onnx.graph import OnnxGraph
from attnrewrite.patterns.onnx.quantised import Rounding, without
from attnrewrite.patterns.onnx.writer import Writer

DRAWS = 4  # inputs that are compared, each with roundings drawn anew: on one, an answer that is rounded may stay
MOST = 4.0  # times what roundings drawn at random change: they add up by chance, and those of one tensor are alike
ROUNDING = 2.0**-20  # what other operations in float32 make of an answer that hardly depends on what is rounded
_HALF = np.array(0.501, np.float32)  # of a step: what rounding moves a number by at most


@dataclass(frozen=True)
class LeftOut:
    """`roundings` inside attentions are left out of a file.

    That changes its answer by `difference`, where numbers as large as the roundings' own steps, drawn at random in
    their place, change it by `drawn`: root mean squares, over that of the answer. `beyond` is the share of the rounded
    numbers that lie beyond the range of their integers, of the attention where that is largest.
    """

    roundings: int
    difference: float
    drawn: float
    beyond: float


def left_out(graph: OnnxGraph, inputs: tuple[Tensor, ...]) -> LeftOut | None:
    """What `graph` leaves out of its file, measured in onnxruntime on `inputs` and what is like them; None where that
    is nothing.

    Raises:
        CheckFailedError: the answer changes by more than MOST times what the steps explain, and than float32 rounds,
            and no number lies beyond its range.
    """
    if not graph.roundings:
        return None
    model, own = graph.quantised, len(graph.quantised.graph.outputs)
    given = [_rolled(inputs, count) for count in range(DRAWS)]
    made = [*zip(*run_each(_showing_shares(model, graph.roundings), given), strict=True)]
    exact = [*zip(*run_each(graph.source, given), strict=True)]
    noisy = [*zip(*run_each(without(model, graph.roundings, _with_noise), given), strict=True)]
    answer, shares = made[:own], made[own:]
    found = LeftOut(
        roundings=len(graph.roundings),
        difference=max(_apart(*pair) for pair in zip(exact, answer, strict=True)),
        drawn=max(_apart(*pair) for pair in zip(noisy, exact, strict=True)),
        beyond=max(float(share) for each in shares for share in each),
    )
    if found.difference > max(MOST * found.drawn, ROUNDING) and not found.beyond:
        raise CheckFailedError(
            f"without the {found.roundings} roundings inside its attention the model's answer changes by "
            f"{found.difference:.1e}, and their steps explain {found.drawn:.1e}: give the model before quantization"
        )
    return found


def _rolled(inputs: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
    """Inputs of the same numbers, which lie in the ranges that the file was quantised for."""
    return tuple(t.roll(count * t.shape[-1] // DRAWS, -1) if t.dim() > 1 else t for t in inputs)


def _apart(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Over all inputs: the root mean square of what is apart, over that of what is wanted."""
    apart = torch.cat([(one.double() - other.double()).reshape(-1) for one, other in zip(found, wanted, strict=True)])
    size = torch.cat([each.double().reshape(-1) for each in wanted]).square().mean().sqrt().clamp(min=1e-12)
    return float(apart.square().mean().sqrt() / size)


def _with_noise(rounded: ir.Value, source: ir.Value) -> ir.Value:
    """`source` and as much noise as rounding makes: uniform, a step wide."""
    undoes = rounded.producer()
    assert undoes is not None
    assert undoes.graph is not None
    writer, seed = Writer(undoes), float(zlib.crc32(str(rounded.name).encode()) % 1000)
    noise = writer.one("RandomUniformLike", [source], "noise", low=-0.5, high=0.5, seed=seed)
    scaled = writer.one("Mul", [noise, _step(writer)], "scaled")
    total = writer.one("Add", [source, scaled], "drawn")
    undoes.graph.insert_before(undoes, writer.nodes)
    return total


def _showing_shares(model: ir.Model, roundings: Sequence[Rounding]) -> ir.Model:
    """A copy whose results are followed by the share of each pair's numbers that it moves by more than half a step."""
    result = model.clone()
    values = {value.name: value for node in result.graph for value in node.outputs}
    for name in dict.fromkeys(each.rounded for each in roundings):
        undoes = values[name].producer()
        assert undoes is not None
        assert undoes.inputs[0] is not None
        rounds, writer = undoes.inputs[0].producer(), Writer(undoes)
        assert rounds is not None
        size = writer.one("Abs", [writer.one("Sub", [values[name], rounds.inputs[0]], "moved")], "size")
        most = writer.one("Mul", [_float(writer, _step(writer), "step"), writer.constant(_HALF, "half")], "most")
        far = writer.one("Greater", [_float(writer, size, "size"), most], "far")
        share = writer.one("ReduceMean", [_float(writer, far, "far")], "beyond", keepdims=0)
        share.type = ir.TensorType(ir.DataType.FLOAT)
        result.graph.extend(writer.nodes)
        result.graph.outputs.append(share)
    return result


def _step(writer: Writer) -> ir.Value:
    """The width of a step of the pair that ends in the writer's node; of steps that differ by channel the largest."""
    unit = writer.node.inputs[1]
    assert unit is not None
    stored = ir.convenience.get_const_tensor(unit)
    if stored is None or not stored.shape.rank():
        return unit
    return writer.constant(np.array(stored.numpy().max()), "largest_step")


def _float(writer: Writer, value: ir.Value, name: str) -> ir.Value:
    return writer.one("Cast", [value], f"{name}_in_float", to=int(ir.DataType.FLOAT))
