"""ReLU for GELU in the MLP behind a rewritten site: SimA's last exponential (section 4)."""

import torch
from torch.fx import GraphModule, Node

_BETWEEN = frozenset(
    [
        "mul",
        "layer_norm",
        "rms_norm",
        "batch_norm",
        "linear",
        "addmm",
        "conv2d",
        "convolution",
        "view",
        "reshape",
        "_unsafe_view",
        "transpose",
        "permute",
        "clone",
    ]
)
_GELU = (torch.ops.aten.gelu.default,)


def relu_for_gelu(module: GraphModule, start: Node) -> int:
    """Replace the GELUs of the MLP that reads what `start` adds to the residual stream; the number replaced.

    The walk goes through norms, linear maps, data movement and one sum; a second sum is the next block's.
    """
    pending, seen, replaced = [(start, 0)], {start}, 0
    while pending:
        node, sums = pending.pop()
        for user in list(node.users):
            if user in seen or user.op != "call_function":
                continue
            seen.add(user)
            name = _name(user)
            if user.target in _GELU:
                user.target, user.kwargs = torch.ops.aten.relu.default, {}
                replaced += 1
            elif name in _BETWEEN or (name == "add" and sums == 0):
                pending.append((user, sums + (name == "add")))
    return replaced


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(schema.name).split("::")[1] if schema is not None else str(node.target)
