"""The aten operators of torch.export graphs, sorted into the matcher's vocabulary by name (overloads share one)."""

from typing import TypeGuard

import torch
from torch.fx import Node

from attnrewrite.patterns.graph import Kind
from attnrewrite.patterns.quantised import UNQUANTISED

MOVES = frozenset((
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "numpy_T", "unsqueeze", "squeeze", "expand",
    "expand_as", "view_as", "reshape_as", "slice", "select", "narrow", "split", "split_with_sizes", "unbind",
    "chunk", "unsafe_chunk", "unsafe_split", "tensor_split", "cat", "concat", "stack", "roll", "flip", "rot90",
    "constant_pad_nd", "repeat", "tile", "repeat_interleave", "index_select", "index", "gather", "take_along_dim",
    "unfold", "unflatten", "flatten", "im2col", "movedim", "swapaxes", "pixel_shuffle", "pixel_unshuffle",
    "select_copy", "slice_scatter", "select_scatter", "diagonal", "broadcast_to", "masked_select", "hsplit",
    "vsplit", "dsplit",
))  # fmt: skip
# reading at positions that are operands themselves
INDEXED = frozenset((
    "index", "gather", "index_select", "take_along_dim",
))  # fmt: skip
# the same elements, perhaps of another type or at another place
IDENTITIES = frozenset((
    "clone", "contiguous", "alias", "detach", "dropout", "dropout_", "lift_fresh", "lift_fresh_copy", "_to_copy",
    "to", "type_as", "float", "half", "bfloat16", "double", "native_dropout", "positive", "alpha_dropout",
    "feature_dropout",
))  # fmt: skip
DROPOUTS = frozenset(("dropout", "dropout_", "native_dropout", "alpha_dropout", "feature_dropout"))
MAPS = frozenset((
    "add", "sub", "rsub", "mul", "div", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "pow", "square", "tanh",
    "sigmoid", "relu", "gelu", "silu", "hardswish", "hardsigmoid", "elu", "softplus", "leaky_relu", "clamp",
    "clamp_min", "clamp_max", "minimum", "maximum", "where", "masked_fill", "erf", "sin", "cos", "floor", "round",
    "reciprocal", "nan_to_num", "logical_not", "logical_and", "logical_or", "eq", "ne", "lt", "le", "gt", "ge",
    "bitwise_not", "bitwise_and", "bitwise_or", "isinf", "isnan", "floor_divide", "remainder", "fmod", "mish",
    "relu6", "hardtanh", "log_sigmoid", "addcmul", "sign", "atan2", "__and__", "__or__", "xlogy", "exp2",
))  # fmt: skip
NORMS = frozenset((
    "layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "group_norm", "native_group_norm",
    "instance_norm", "batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit",
    "native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit_functional",
))  # fmt: skip
POOLS = frozenset((
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d", "max_pool2d_with_indices",
    "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "interpolate",
))  # fmt: skip
REDUCTIONS = frozenset((
    "sum", "mean", "amax", "amin", "max", "min", "linalg_vector_norm", "norm", "var", "std", "prod", "logsumexp",
    "any", "all",
))  # fmt: skip
# softmax(query key^T) value in one operator; the long names are what torch chooses for a device
FUSED_ATTENTION = frozenset((
    "scaled_dot_product_attention", "_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
))  # fmt: skip
# attention and what is around it in one operator, and what to do about it
WHOLE_ATTENTION = {
    **dict.fromkeys(
        ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"),
        "export the model without torch's fast path",
    ),
    **dict.fromkeys(
        ("_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward"),
        "export the model before its operators are chosen for a device",
    ),
    "flex_attention": "ask for its result alone, not for sums or maxima beside it (return_lse, return_aux)",
}
# libraries of operators that round to integers or compute on them
_ON_INTEGERS = frozenset(("quantized", "quantized_decomposed", "torchao"))
# what to give in place of a model that computes on integers
UNQUANTISED_PROGRAM = f"{UNQUANTISED}, or, where its scales are fixed, what torch.onnx.export writes of it"
# ask an operand for its shape and type alone
FACTORIES = frozenset((
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
    "rand_like", "randn_like", "sym_size",
))  # fmt: skip

KINDS: dict[str, Kind] = {
    **dict.fromkeys(MOVES, "move"),
    **dict.fromkeys(MAPS, "map"),
    **dict.fromkeys(NORMS, "norm"),
    **dict.fromkeys(POOLS, "pool"),
    **dict.fromkeys(REDUCTIONS, "reduce"),
}


def operator_name(node: Node) -> str:
    """The operator's name without namespace and overload; of what calls no function, what it does instead."""
    if node.op != "call_function":
        return node.op
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return getattr(target, "__name__", str(target))


def computes_on_integers(node: Node) -> bool:
    """Whether its operator rounds to integers of a scale, undoes that, or computes on such integers."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _ON_INTEGERS


def asserts(node: Node) -> bool:
    """Whether it is an assertion, of values or of what export knows of them: it computes nothing."""
    return node.op == "call_function" and operator_name(node).startswith("_assert") and not node.users


def is_open(size: int | torch.SymInt) -> TypeGuard[torch.SymInt]:
    """Whether a length is left open: torch.export also writes lengths that it has settled as symbols."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def draws_numbers(node: Node) -> bool:
    """Whether an operation draws random numbers. Attention and dropout may not, and are marked as if they did."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    named = {known.name: given for known, given in zip(target._schema.arguments, node.args, strict=False)}
    given = named | node.kwargs
    active = given.get("train", True) and given.get("training", True)
    return bool(active and given.get("dropout_p", 0.0 if "attention" in str(target) else 1.0))


def module_path(node: Node) -> str:
    """The path of the innermost module that a node was traced in; empty where that is the model itself or not known."""
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return next((path for path in reversed(paths) if path and "_empty_nn_module_stack" not in path), "")
