"""torch's flex_attention, whose scores and mask are functions of one score and its place, written out for all of them.

These functions are pointwise: on scores [batch, heads, queries, keys] and on places that lie along an axis of their own
each, their graphs compute by broadcasting what torch computes place by place.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.fx.decompositions import Decompose
from attnrewrite.passes.fx.edited import copied, input_specs, with_graph
from attnrewrite.passes.fx.pieces import put, traced
from attnrewrite.passes.fx.signature import other_signature

aten = torch.ops.aten
TRUTHS = {aten.new_ones.default, aten.ones.default}  # what a mask is that hides nothing


@dataclass(frozen=True)
class WriteOutFlex(Pass[ExportedProgram]):
    """Every flex_attention as scaled_dot_product_attention, or, where its scores are changed, as product and softmax.

    One whose sums or maxima are asked for stays as it is.
    """

    def rewrite(self, graph: ExportedProgram) -> PassResult[ExportedProgram]:
        if not any(_is_flex(node) for node in graph.graph.nodes):
            return PassResult(graph)
        program = Decompose()(graph)  # of its functions, too, which index by operators of their own otherwise
        edited = copied(program.graph)
        edits = [edit for node in list(edited.nodes) if _is_flex(node) and (edit := _written_out(node, program))]
        edited.eliminate_dead_code()
        state = {**program.constants, **program.state_dict}
        return PassResult(with_graph(program, edited, input_specs(program, edited), state), tuple(edits))

    def ensures(self, before: ExportedProgram, result: PassResult[ExportedProgram]) -> Refusal | None:
        """The same inputs and outputs."""
        return other_signature(before, result.graph)


def _is_flex(node: Node) -> bool:
    return node.target is torch.ops.higher_order.flex_attention


def _written_out(node: Node, program: ExportedProgram) -> Edit | None:
    if not all(user.target is operator.getitem and user.args[1] == 0 for user in node.users if user.users):
        return None
    given = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]

    def compute(*operands: Tensor) -> Tensor:
        values: dict[Node, Any] = dict(zip(given, operands, strict=True))

        def value(each: Node) -> Any:
            return values[each] if each in values else getattr(program.graph_module, str(each.target))

        arguments: Any = map_arg(node.args, value)
        return _attention(node.meta["val"][0].stride(), *arguments)

    piece = traced(compute, given)
    standing = put(piece, given, node, node.meta)
    made = standing[piece.output_node().args[0]]  # type: ignore[index]
    for user in list(node.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(made)
    return Edit(node.name, made.name)


def _attention(
    strides: Sequence[int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: GraphModule,
    block_mask: Sequence[Any],
    scale: float,
    _: Any,
    score_tensors: Sequence[Tensor] = (),
    mask_tensors: Sequence[Tensor] = (),
) -> Tensor:
    """What flex_attention gives, as it lies in memory there: views of it have to stay views."""
    places = [
        torch.arange(size, device=query.device).reshape([-1 if axis == other else 1 for other in range(4)])
        for axis, size in enumerate((*query.shape[:3], key.shape[2]))
    ]
    groups, mask_mod = query.shape[1] // key.shape[1], block_mask[-1]
    if groups > 1:
        key, value = (each[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for each in (key, value))
    mask = None if _result(mask_mod).target in TRUTHS else mask_mod(*places, *mask_tensors)
    if _result(score_mod).op == "placeholder":
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    else:
        scores = score_mod(query @ key.transpose(-2, -1) * scale, *places, *score_tensors)
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        out = torch._safe_softmax(scores, -1) @ value
    order = sorted(range(4), key=lambda axis: -strides[axis])
    back = [order.index(axis) for axis in range(4)]
    return out.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


def _result(function: GraphModule) -> Node:
    (result,) = function.graph.output_node().all_input_nodes
    return result
