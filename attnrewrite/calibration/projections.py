"""The projections that a site's module does not hold, as something lies between them and the attention (a rotary
embedding, a normalisation of queries): the graph makes its queries and keys of them, and a search changes them there.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from attnrewrite.calibration.branches import shape_of, varying_nodes
from attnrewrite.passes.site_module import Read, SiteModule, read

ROLES = ("query", "key", "value")


class TracedRead(nn.Module):
    """The part of a graph that makes the heads' queries, keys or values of tokens [B, N, C]."""

    def __init__(self, own: Read, part: GraphModule, heads: int) -> None:
        super().__init__()
        self.layout = own.layout
        self.heads = heads
        self.part = part

    def tokens(self, tensor: Tensor) -> Tensor:
        return tensor

    def project(self, tokens: Tensor) -> Tensor:
        """[B, N, C] -> [B, heads, N, channels]."""
        return read(self.part(tokens), self.layout)

    def forward(self, tensor: Tensor) -> Tensor:
        return self.project(tensor)


@dataclass(frozen=True)
class _Part:
    """The nodes from a linear map of `tokens` to `end`, with the constants that they read; `lengths` are batches'."""

    tokens: Node
    end: Node
    nodes: frozenset[Node]
    lengths: frozenset[Node]


def with_projections(module: GraphModule, node: Node) -> tuple[SiteModule, tuple[Node, ...]]:
    """The site of `module` that stands at `node`, with readers of tokens where the graph projects them for it alone,
    and the nodes whose values that is called with. Its parameters are the module's own.
    """
    site = module.get_submodule(str(node.target))
    assert isinstance(site, SiteModule)
    given = dict(zip(site.values, node.args, strict=True))
    parts = _parts(module, node, site)
    if not parts:
        return site, tuple(given.values())  # type: ignore[arg-type]
    found = copy.copy(site)
    found._modules = dict(site._modules)
    found.roles = dict(site.roles)
    inside = frozenset().union(*(part.nodes for part in parts.values()))
    for role, part in parts.items():
        given[part.tokens.name] = part.tokens
        found.roles[role] = part.tokens.name
        setattr(found, role, TracedRead(getattr(site, role), _as_module(module, part, inside), site.heads))
    found.values = tuple(given)
    return found, tuple(given.values())  # type: ignore[arg-type]


def _parts(module: GraphModule, node: Node, site: SiteModule) -> dict[str, _Part]:
    """The parts of the roles that `site` reads as heads; none where anything else reads what lies in them."""
    roles = [role for role in ROLES if isinstance(getattr(site, role), Read)]
    if not roles:
        return {}
    ends, varying = dict(zip(site.values, node.args, strict=True)), varying_nodes(module)
    traced = {role: _traced(module, ends[site.roles[role]], varying) for role in roles}  # type: ignore[arg-type]
    parts = {role: part for role, part in traced.items() if part is not None}
    inside = {node}.union(*(part.nodes | part.lengths for part in parts.values()))
    read_inside = (user for part in parts.values() for own in part.nodes & varying for user in own.users)
    return parts if all(user in inside or _is_length(user) for user in read_inside) else {}


def _traced(module: GraphModule, end: Node, varying: set[Node]) -> _Part | None:
    """Back from `end` to the one linear map that all it varies with comes through, and to constants."""
    found: set[Node] = set()
    lengths: set[Node] = set()
    tokens: set[Node] = set()
    walk = [end]
    while walk:
        node = walk.pop()
        if node in found or node in lengths:
            continue
        if not _can_hold(module, node):
            return None
        if _is_length(node):
            lengths.add(node)
            continue
        found.add(node)
        behind = node.all_input_nodes
        if node in varying and node.target is torch.ops.aten.linear.default:
            tokens.add(behind[0])
            behind = behind[1:]
        walk += behind
    if len(tokens) != 1:
        return None
    (start,) = tokens
    batch, *others = shape_of(start)
    same = len(others) == 2 and shape_of(end)[:1] == (batch,) and all(_length(node) == batch for node in lengths)
    return _Part(start, end, frozenset(found), frozenset(lengths)) if same and start not in found else None


def _can_hold(module: GraphModule, node: Node) -> bool:
    """Whether a part can: operations and stored tensors."""
    if node.op == "get_attr":
        return isinstance(attrgetter(str(node.target))(module), Tensor)
    return node.op == "call_function"


def _as_module(module: GraphModule, part: _Part, inside: frozenset[Node]) -> GraphModule:
    """`part` as a module of the tokens: matrices that nothing but `inside` reads are the graph's own. Norms and biases
    are constants: a form's maps follow them, and files store those that are ones or zeros once for many.
    """
    graph = Graph()
    tokens = graph.placeholder("tokens")
    made = {part.tokens: tokens}
    made |= dict.fromkeys(part.lengths, graph.call_function(torch.ops.aten.sym_size.int, (tokens, 0)))
    stored: dict[str, Tensor] = {}
    constants: dict[Node, Any] = {}

    def place(node: Node) -> Node:
        if node not in made:
            name = f"stored{len(stored)}"
            stored[name], made[node] = constants[node], graph.get_attr(name)
        return made[node]

    for node in module.graph.nodes:
        if node not in part.nodes:
            continue
        if node.op == "get_attr":
            tensor = attrgetter(str(node.target))(module)
            matrix = isinstance(tensor, nn.Parameter) and tensor.dim() > 1
            own = matrix and all(each in inside for each in _readers(module, node))
            constants[node] = tensor if own else tensor.detach()
            if own:
                place(node)
        elif all(each in constants and each not in made for each in node.all_input_nodes):
            constants[node] = node.target(*map_arg(node.args, constants.get), **map_arg(node.kwargs, constants.get))
        else:
            made[node] = graph.node_copy(node, place)
    place(part.end)
    graph.output(made[part.end])
    return GraphModule(stored, graph)


def _readers(module: GraphModule, stored: Node) -> Iterator[Node]:
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target == stored.target:
            yield from node.users


def _is_length(node: Node) -> bool:
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def _length(node: Node) -> str:
    return str(node.meta["val"])
