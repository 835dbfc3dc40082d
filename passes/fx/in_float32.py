"""Half precision computed in float32: for compilers that read it in mixed types, or not at all."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map

from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.copying import quiet_copying

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class InFloat32(Pass[GraphModule]):
    """float16 and bfloat16 become float32: parameters, buffers, and the types that operators are given."""

    def rewrite(self, graph: GraphModule) -> PassResult[GraphModule]:
        held = {**dict(graph.named_parameters()), **dict(graph.named_buffers())}
        edits = [Edit(name, "float32") for name, tensor in held.items() if tensor.dtype in HALVES]
        edits += [Edit(node.name, "float32") for node in graph.graph.nodes if _names_half((node.args, node.kwargs))]
        if not edits:
            return PassResult(graph)
        with quiet_copying():
            wide = copy.deepcopy(graph)
        for node in wide.graph.nodes:
            node.args, node.kwargs = tree_map(_as_float32, (node.args, node.kwargs))
        wide.recompile()
        wide._apply(lambda tensor: tensor.float() if tensor.dtype in HALVES else tensor)
        return PassResult(wide, tuple(edits))


def _names_half(given: Any) -> bool:
    return any(isinstance(leaf, torch.dtype) and leaf in HALVES for leaf in tree_leaves(given))


def _as_float32(leaf: Any) -> Any:
    return torch.float32 if isinstance(leaf, torch.dtype) and leaf in HALVES else leaf
