"""Fused and general operators of ONNX written out in plain ones, so that the matcher and the rewrite see operands.

`write_out` replaces one node in place by nodes that compute the same. What attends stays one node, `Attention` of the
private domain: query, key, value [batch, heads, tokens, channels], and a mask where there is one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from attnrewrite.errors import Refusal
from attnrewrite.patterns.onnx.einsum import write_einsum
from attnrewrite.patterns.onnx.few_bits import write_product_of_bits, write_product_of_levels
from attnrewrite.patterns.onnx.operators import IDENTITIES, MAPS
from attnrewrite.patterns.onnx.sizes import Sizes
from attnrewrite.patterns.onnx.writer import Setting, Writer, integer, number
from attnrewrite.patterns.onnx.written_parts import write_sum

_MICROSOFT = "com.microsoft"


# The value that the plain nodes make, None where the node is plain as it stands
WriteOut = Callable[[Writer, ir.Node, Setting], "ir.Value | Refusal | None"]


def write_out(graph: ir.Graph, node: ir.Node, sizes: Sizes, opsets: Mapping[str, int]) -> Refusal | None:
    """Replace `node` by plain nodes where it is fused; the refusal of one that cannot be written out."""
    rule = _RULES.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))
    if rule is None:
        return None
    if any(value is not None and value.name not in sizes.size for value in node.inputs):
        return None  # nothing can be said of it: the softmax itself is reported
    writer = Writer(node)
    made = rule(writer, node, Setting(sizes, opsets))
    if isinstance(made, ir.Value):
        ir.convenience.replace_nodes_and_values(graph, node, [node], writer.nodes, [node.outputs[0]], [made])
    return made if isinstance(made, Refusal) else None


def written_out_before(graph: ir.Graph, node: ir.Node) -> list[ir.Node]:
    """The nodes in front of `node` that have to be written out for its own rule to see what it is made of."""
    first = list(graph)[: list(graph).index(node)] if node.op_type in _ONE_OF_ANOTHER else []
    return [each for each in first if each.op_type == node.op_type]


def operand(node: ir.Node, place: int) -> ir.Value | None:
    return node.inputs[place] if place < len(node.inputs) else None


def _extra_outputs(node: ir.Node) -> bool:
    """Whether anything but the first output is read."""
    return any(value.uses() or value.is_graph_output() for value in node.outputs[1:])


def _attention(writer: Writer, node: ir.Node, setting: Setting) -> ir.Value | Refusal:
    """Attention of opset 23 and later: 3-D operands with the heads in attributes, or 4-D."""
    query, key, value = node.inputs[:3]
    assert query is not None
    assert key is not None
    assert value is not None
    if any(operand(node, place) is not None for place in (4, 5, 6)) or _extra_outputs(node):
        return Refusal("cache-or-scores", "it keeps keys and values of earlier calls, or gives out its scores")
    if number(node, "softcap"):
        return Refusal("softcap", "it caps its scores (softcap)")
    if len(setting.size(query)) == 4:
        return writer.attend((query, key, value), operand(node, 3), "is_causal")
    heads, kv_heads = integer(node, "q_num_heads"), integer(node, "kv_num_heads")
    if not heads or not kv_heads:
        return Refusal("unsaid-heads", "its operands have three axes and it does not say how many heads")
    counts = (heads, kv_heads, kv_heads)
    split = [writer.split_heads(v, n, role) for v, n, role in zip((query, key, value), counts, _ROLES, strict=True)]
    return writer.join_heads(writer.attend(split, operand(node, 3), "is_causal"))


def _multi_head_attention(writer: Writer, node: ir.Node, setting: Setting) -> ir.Value | Refusal:
    """com.microsoft MultiHeadAttention: separate operands, packed QKV [B, N, H, 3, d] or packed KV [B, M, H, 2, d]."""
    query, key, value, bias = (operand(node, place) for place in range(4))
    assert query is not None
    heads = integer(node, "num_heads")
    if any(operand(node, place) is not None for place in (4, 6, 7, 8, 9)) or _extra_outputs(node):
        return Refusal("padding-or-cache", "it has a key padding mask, or keeps keys and values of earlier calls")
    if bias is not None and (key is None or value is None):
        return Refusal("packed-bias", "it packs its operands and adds a bias to them")
    if key is None:
        split = [_unpack(writer, query, place, name) for place, name in enumerate(_ROLES)]
    elif value is None:
        unpacked = (_unpack(writer, key, place, name) for place, name in enumerate(("key", "value")))
        split = [writer.split_heads(query, heads, "query"), *unpacked]
    else:
        operands = [query, key, value]
        if bias is not None:
            operands = _with_bias(writer, operands, bias, setting)
        if any(len(setting.size(v)) != 3 for v in (query, key, value)):
            return Refusal("split-keys", "its keys and values come with their heads split, as from a cache")
        split = [writer.split_heads(v, heads, name) for v, name in zip(operands, _ROLES, strict=True)]
    return writer.join_heads(writer.attend(split, operand(node, 5), "unidirectional"))


def _unpack(writer: Writer, packed: ir.Value, place: int, name: str) -> ir.Value:
    """Part `place` of [B, N, H, parts, d] as [B, H, N, d]."""
    index = writer.constant(np.array(place, np.int64), f"{name}_place")
    return writer.transpose(writer.one("Gather", [packed, index], f"{name}_taken", axis=3), (0, 2, 1, 3), name)


def _with_bias(writer: Writer, operands: list[ir.Value], bias: ir.Value, setting: Setting) -> list[ir.Value]:
    widths = [setting.size(v)[-1] for v in operands]
    parts = _split(writer, bias, widths, 0, "bias")
    pairs = enumerate(zip(operands, parts, strict=True))
    return [writer.one("Add", [v, part], f"biased.{place}") for place, (v, part) in pairs]


def _split(writer: Writer, value: ir.Value, widths: Sequence[int], axis: int, name: str) -> list[ir.Value]:
    """`value` cut along `axis` into parts of these widths (by Slice, whose form is the same in every opset from 10)."""
    ends = np.cumsum(widths)
    parts = []
    for place, (end, width) in enumerate(zip(ends, widths, strict=True)):
        limits = {"from": end - width, "to": end, "axis": axis}
        bounds = [writer.constant(np.array([n], np.int64), f"{name}_{what}.{place}") for what, n in limits.items()]
        parts.append(writer.one("Slice", [value, *bounds], f"{name}.{place}"))
    return parts


def _packed_attention(writer: Writer, node: ir.Node, setting: Setting) -> ir.Value | Refusal:
    """com.microsoft Attention: the packed projection is inside the node."""
    tokens, weight, bias = (operand(node, place) for place in range(3))
    assert tokens is not None
    if weight is None:
        return Refusal("no-weights", "it has no weights of its own")
    special = any(operand(node, place) is not None for place in (3, 4, 6)) or integer(node, "do_rotary")
    if special or _extra_outputs(node):
        why = "it has a key padding mask, rotates its queries, or keeps keys and values of earlier calls"
        return Refusal("padding-rotation-or-cache", why)
    heads, total = integer(node, "num_heads"), setting.size(weight)[-1]
    given = node.attributes.get("qkv_hidden_sizes")
    widths = [total // 3] * 3 if given is None else list(given.as_ints())
    packed = writer.one("MatMul", [tokens, weight], "projected")
    if bias is not None:
        packed = writer.one("Add", [packed, bias], "biased")
    parts = _split(writer, packed, widths, -1, "packed")
    split = [writer.split_heads(part, heads, name) for part, name in zip(parts, _ROLES, strict=True)]
    return writer.join_heads(writer.attend(split, operand(node, 5), "unidirectional"))


def _fused_matmul(writer: Writer, node: ir.Node, setting: Setting) -> ir.Value:
    """com.microsoft FusedMatMul and TransposeMatMul: alpha * op(A) op(B), where op may move the first axis behind the
    other batch axes (transBatch), and then exchange the last two (trans).
    """
    sides = []
    for value, name in zip(node.inputs, ("A", "B"), strict=True):
        assert value is not None
        order = list(range(len(setting.size(value))))
        if integer(node, f"transBatch{name}"):
            order.insert(-1, order.pop(0))
        if integer(node, f"trans{name}"):
            order[-2:] = reversed(order[-2:])
        sides.append(writer.transpose(value, order, f"turned_{name}"))
    product = writer.one("MatMul", sides, "product")
    alpha = number(node, "alpha")
    if alpha in (None, 1.0):
        return product
    factor = np.array(alpha, setting.dtype(node.inputs[0]).numpy())
    return writer.one("Mul", [product, writer.constant(factor, "alpha")], "scaled")


def _bias_gelu(writer: Writer, node: ir.Node, setting: Setting) -> ir.Value:
    """com.microsoft BiasGelu: GELU of a sum."""
    return writer.one("Gelu", [writer.one("Add", node.inputs, "sum")], "gelu", _MICROSOFT)


def _activated(plain: str) -> WriteOut:
    """com.microsoft FusedConv and FusedGemm: the `plain` operator, plus what stands beside it, and an activation."""

    def write(writer: Writer, node: ir.Node, setting: Setting) -> ir.Value | None:
        activation = node.attributes.get_string("activation", "Identity")
        arguments = _ACTIVATIONS.get(activation or "Identity")
        given = list(node.attributes.get_floats("activation_params", ()) or ())
        if arguments is None or len(given) != len(arguments):
            return None
        own = {name: each.value for name, each in node.attributes.items() if not name.startswith("activation")}
        made = writer.one(plain, node.inputs[:3], "plain", **own)
        if (beside := operand(node, 3)) is not None:
            made = writer.one("Add", [made, beside], "sum")
        settled: dict[str, Any] = dict(zip(arguments, given, strict=True))
        return writer.one(activation or "Identity", [made], "activated", **settled)

    return write


def _joint_softmax(writer: Writer, node: ir.Node, setting: Setting) -> ir.Value | None:
    """Softmax before opset 13 runs over all axes from `axis` on, taken as one."""
    value = node.inputs[0]
    assert value is not None
    rank = len(setting.size(value))
    axis = integer(node, "axis", 1) % max(rank, 1)
    if setting.version >= 13 or axis >= rank - 1:
        return None
    soft = writer.one("Softmax", [writer.one("Flatten", [value], "flat", axis=axis)], "softmax", axis=1)
    return writer.one("Reshape", [soft, writer.one("Shape", [value], "shape")], "unflattened")


def _einsum(writer: Writer, node: ir.Node, setting: Setting) -> ir.Value | Refusal:
    operands = [value for value in node.inputs if value is not None]
    equation, keys = node.attributes["equation"].as_string(), _softmax_axis(node, setting)
    if keys is None and [value.is_initializer() for value in operands] == [True, False] and equation.count(",") == 1:
        weights, tokens, *result = re.split(",|->", equation)  # as tokens by weights: the product that a Linear is
        equation, operands = "->".join([f"{tokens},{weights}", *result]), operands[::-1]
    return write_einsum(writer, equation, operands, setting.size, keys)


def _softmax_axis(node: ir.Node, setting: Setting) -> int | None:
    """The axis that a softmax of what `node` makes runs over; None where there is none, or several run over others."""
    waiting, seen, axes = [node.outputs[0]], set(), set()
    while waiting:
        for user, _ in waiting.pop().uses():
            if user.op_type in ("Softmax", "LogSoftmax"):
                axes.add(integer(user, "axis", -1 if setting.version >= 13 else 1))
            elif user not in seen and (user.op_type in MAPS or user.op_type in IDENTITIES):
                seen.add(user)
                waiting.append(user.outputs[0])
    return axes.pop() if len(axes) == 1 else None


_ROLES = ("query", "key", "value")
_ONE_OF_ANOTHER = frozenset({"ScatterND"})  # which read, in what is written to, what others of them wrote
# what a fused operator may end in, and the attributes that its parameters are
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Identity", "Relu", "Sigmoid", "Tanh"), ()),
    "LeakyRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
}
_RULES: dict[tuple[str, str], WriteOut] = {
    ("", "Attention"): _attention,
    ("", "Einsum"): _einsum,
    ("", "Softmax"): _joint_softmax,
    ("", "ScatterND"): write_sum,
    (_MICROSOFT, "MultiHeadAttention"): _multi_head_attention,
    (_MICROSOFT, "Attention"): _packed_attention,
    (_MICROSOFT, "FusedMatMul"): _fused_matmul,
    (_MICROSOFT, "TransposeMatMul"): _fused_matmul,
    (_MICROSOFT, "BiasGelu"): _bias_gelu,
    (_MICROSOFT, "FusedConv"): _activated("Conv"),
    (_MICROSOFT, "FusedGemm"): _activated("Gemm"),
    (_MICROSOFT, "MatMulNBits"): write_product_of_bits,
    (_MICROSOFT, "MatMulBnb4"): write_product_of_levels,
}
