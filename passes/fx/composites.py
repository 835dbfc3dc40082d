"""What torch spells as one composite operator or by a second name, written out where it stands in the graph.

torch's own definitions are not used: they take products apart as far as they go, and write some in elementwise form.
"""

import string
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.fx.einsum import einsum_as_product
from attnrewrite.passes.fx.pieces import constant_nodes, put, traced
from attnrewrite.patterns.fx.normalise import arguments_of
from attnrewrite.patterns.fx.operators import IDENTITIES, KINDS, operator_name

aten = torch.ops.aten
Definition = Callable[..., Any]


def _baddbmm(x: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.bmm(left, right)
    product = product if alpha == 1 else product * alpha
    return product if beta == 0 else product + (x if beta == 1 else x * beta)


def _tensordot(
    left: Tensor, right: Tensor, summed: Sequence[int], with_these: Sequence[int], *, keys: int | None = None
) -> Tensor:
    letters = iter(string.ascii_letters)
    first = [next(letters) for _ in range(left.dim())]
    second = [next(letters) for _ in range(right.dim())]
    for one, other in zip(summed, with_these, strict=True):
        second[other] = first[one]
    kept = [each for each in (*first, *second) if (each in first) != (each in second)]
    return einsum_as_product(f"{''.join(first)},{''.join(second)}->{''.join(kept)}", (left, right), keys=keys)


def _inner(left: Tensor, right: Tensor, *, keys: int | None = None) -> Tensor:
    return _tensordot(left, right, (-1,), (-1,), keys=keys) if left.dim() and right.dim() else left * right


def _transposed(x: Tensor) -> Tensor:
    return NotImplemented if x.is_complex() else x.transpose(-2, -1)


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.softmax(x, dim, dtype)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *given: Any, enable_gqa: bool = False, **options: Any
) -> Tensor:
    """Attention whose heads of keys serve several of queries, each with its own copy."""
    if not enable_gqa:
        return NotImplemented
    key, value = (heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3) for heads in (key, value))
    return F.scaled_dot_product_attention(query, key, value, *given, **options)


def _written_at(x: Tensor, indices: Sequence[Tensor | None], value: Tensor, accumulate: bool = False) -> Tensor:
    """One number written over what one operand says: the positions of an axis, or the truths of several."""
    given = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if accumulate or value.numel() != 1 or len(given) != 1:
        return NotImplemented
    ((axis, index),) = given
    if index.dtype != torch.bool:
        if index.dim() > 1 or not isinstance(x.shape[axis], int):
            return NotImplemented
        places = torch.arange(x.shape[axis], device=x.device)
        index = (places[:, None] == index.reshape(-1) % x.shape[axis]).any(1)
    mask = index.reshape(*index.shape, *[1] * (x.dim() - axis - index.dim()))
    return torch.where(mask, value.reshape(()), x)


# products whose axes have names, or numbers: they are told which of theirs a softmax runs over, as `keys`
PRODUCTS: dict[Any, Definition] = {
    aten.einsum.default: einsum_as_product,
    aten.inner.default: _inner,
    aten.tensordot.default: _tensordot,
}
# products and softmaxes by other names, heads that are shared, and movement that says where to by another tensor
DEFINITIONS: dict[Any, Definition] = {
    aten.baddbmm.default: _baddbmm,
    aten.index_put.default: _written_at,
    aten.linalg_matmul.default: torch.matmul,
    aten.linalg_multi_dot.default: lambda matrices: reduce(torch.matmul, matrices),
    aten.chain_matmul.default: lambda matrices: reduce(torch.matmul, matrices),
    aten.special_softmax.default: _softmax,
    aten.scaled_dot_product_attention.default: _attention,
    aten.adjoint.default: _transposed,
    aten.mH.default: _transposed,
    aten.mT.default: _transposed,
    aten.matrix_H.default: _transposed,
    aten.expand_as.default: lambda x, other: x.expand(other.shape),
    aten.moveaxis.int: torch.movedim,
    aten.moveaxis.intlist: torch.movedim,
    aten.ravel.default: lambda x: x.reshape(-1),
    aten.reshape_as.default: lambda x, other: x.reshape(other.shape),
    aten.swapdims.default: torch.transpose,
    aten.view_as.default: lambda x, other: x.view(other.shape),
}
SOFTMAXES = frozenset(("softmax", "_softmax", "special_softmax", "log_softmax", "_log_softmax", "special_log_softmax"))
# second names of operators, overload by overload
SYNONYMS = {
    "absolute": "abs", "arctan2": "atan2", "clip": "clamp", "concatenate": "cat", "divide": "div", "greater": "gt",
    "greater_equal": "ge", "less": "lt", "less_equal": "le", "multiply": "mul", "negative": "neg", "not_equal": "ne",
    "subtract": "sub", "true_divide": "div",
}  # fmt: skip


@dataclass(frozen=True)
class WriteOutComposites(Pass[GraphModule]):
    """Every product as matmul, softmax as softmax, movement by numbers alone, and each operator by its first name.

    A definition that returns NotImplemented leaves its operator as it is.
    """

    in_place: ClassVar[bool] = True

    def rewrite(self, graph: GraphModule) -> PassResult[GraphModule]:
        constants = constant_nodes(graph.graph)
        edits = [edit for node in list(graph.graph.nodes) if (edit := _renamed(node) or _written_out(node, constants))]
        if edits:
            graph.recompile()
        return PassResult(graph, tuple(edits))


def _renamed(node: Node) -> Edit | None:
    called = node.target
    if not isinstance(called, torch._ops.OpOverload) or called.namespace != "aten":
        return None
    first = SYNONYMS.get(called._opname)
    if first is None:
        return None
    node.target = getattr(getattr(aten, first), called._overloadname)
    return Edit(str(called), str(node.target))


def _written_out(node: Node, constants: Set[Node]) -> Edit | None:
    """Put the definition of a composite in its place; None where there is none, or it leaves the node as it is."""
    definition = DEFINITIONS.get(node.target)
    if node.target in PRODUCTS:
        keys = _softmax_axis(node)
        definition = partial(PRODUCTS[node.target], keys=keys)
        if node.target is aten.einsum.default and keys is None:
            _put_weights_last(node, constants)
    piece = None if definition is None else _piece(node, definition)
    if piece is None:
        return None
    standing = put(piece, node.all_input_nodes, node, node.meta)
    made = standing[piece.output_node().args[0]]  # type: ignore[index]
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    return Edit(str(node.target), made.name)


def _put_weights_last(node: Node, constants: Set[Node]) -> None:
    """An einsum of weights and tokens as that of tokens and weights: the product that a linear layer is."""
    inputs, arrow, output = str(node.args[0]).partition("->")
    if [operand in constants for operand in node.all_input_nodes] == [True, False] and inputs.count(",") == 1:
        weights, tokens = inputs.split(",")
        node.args = (f"{tokens},{weights}{arrow}{output}", node.all_input_nodes[::-1])


def _softmax_axis(node: Node) -> int | None:
    """The axis that a softmax of what `node` makes runs over; None where there is none, or several run over others."""
    rank, axes, waiting, seen = node.meta["val"].dim(), set(), [node], {node}
    while waiting:
        for user in waiting.pop().users:
            name, value = operator_name(user), user.meta.get("val")
            same = isinstance(value, Tensor) and value.dim() == rank
            if name in SOFTMAXES and same:
                axes.add(int(arguments_of(user)["dim"]) % rank)
            elif user not in seen and same and (name in IDENTITIES or KINDS.get(name) == "map"):
                seen.add(user)
                waiting.append(user)
    return axes.pop() if len(axes) == 1 else None


def _piece(node: Node, definition: Definition) -> Graph | None:
    """The graph of what `definition` makes of the node's operands; None where it leaves them to the node."""
    given = node.all_input_nodes

    def compute(*operands: Any) -> Any:
        values = dict(zip(given, operands, strict=True))
        arguments, keywords = map_arg((node.args, node.kwargs), values.__getitem__)
        made = definition(*arguments, **keywords)
        return () if made is NotImplemented else made

    piece = traced(compute, given)
    return piece if isinstance(piece.output_node().args[0], Node) else None
