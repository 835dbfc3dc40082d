"""The projections that a site's module does not hold, as something lies between them and the attention: a rotary
embedding, a normalisation of queries or of the result, a gate. A search goes through that part of the graph, and
changes the projections of query, key and value there.
"""

import copy
import operator
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from attnrewrite.calibration.branches import Branch, shape_of, varying_nodes
from attnrewrite.passes.site_module import Read, SiteModule, Write, read, write

ROLES = ("query", "key", "value")

_DIVIDES = {operator.getitem, *(getattr(torch.ops.aten, name).default for name in ("view", "reshape", "permute"))}
_DIVIDES |= {getattr(torch.ops.aten, name).int for name in ("transpose", "select", "unbind", "unflatten")}
_DIVIDES |= {torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default, torch.ops.aten.chunk.default}
_DIVIDES |= {torch.ops.aten.slice.Tensor, torch.ops.aten.flatten.using_ints}
_MAPS = {torch.ops.aten.linear.default, torch.ops.aten.conv2d.default, torch.ops.aten.matmul.default}


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


class TracedWrite(nn.Module):
    """The part of a graph that makes what a linear map gives [B, N, outputs] of the heads' outputs, and of the value
    called `beside`, if it reads another.
    """

    def __init__(self, own: Write, part: GraphModule, beside: str | None) -> None:
        super().__init__()
        self.layout = own.layout
        self.part = part
        self.beside = beside

    def forward(self, heads: Tensor, *beside: Tensor) -> Tensor:
        return self.part(write(heads, self.layout), *beside)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Part:
    """The nodes from what is made of `inputs`, of which each image has rows of its own, to `end`, with the constants
    that they read; `lengths` are batches'.
    """

    inputs: tuple[Node, ...]
    end: Node
    nodes: frozenset[Node]
    lengths: frozenset[Node]

    @property
    def sound(self) -> bool:
        """Whether it can be called with other images, and as few as one likes."""
        batches = {shape_of(node)[:1] for node in (*self.inputs, self.end)}
        return () not in batches and len(batches | {(_length(node),) for node in self.lengths}) == 1


@dataclass(frozen=True)
class Searched:
    """A site with what the graph does for it around it, and the nodes whose values that `reads`, in the order of its
    `values`; `begins` is the first node whose value changes with its projections.
    """

    site: SiteModule
    reads: tuple[Node, ...]
    begins: Node

    @property
    def projections(self) -> tuple[nn.Parameter, ...]:
        """The weights of query, key and value, each once."""
        readers = (getattr(self.site, role) for role in ROLES)
        return tuple(dict.fromkeys(own for reader in readers for own in reader.parameters()))


def with_projections(module: GraphModule, node: Node, reached: Branch | None = None) -> Searched:
    """The site of `module` that stands at `node`, with readers of tokens where the graph projects them for it alone,
    and a writer of what the map of the branch gives that it has `reached`. Its parameters are the module's own.
    """
    site = module.get_submodule(str(node.target))
    assert isinstance(site, SiteModule)
    given: dict[str, Node] = dict(zip(site.values, node.args, strict=True))  # type: ignore[arg-type]
    found = copy.copy(site)
    found._modules, found.roles = dict(site._modules), dict(site.roles)
    varying = varying_nodes(module)
    parts = _parts(module, node, site, varying)
    inside = frozenset().union(*(part.nodes for part in parts.values()))
    for role, part in parts.items():
        (tokens,) = part.inputs
        given[tokens.name] = tokens
        found.roles[role] = tokens.name
        setattr(found, role, TracedRead(getattr(site, role), _as_module(module, part, inside), site.heads))
    way = None if reached is None else _way_out(module, node, reached.node)
    if way is not None:
        given |= {each.name: each for each in way.inputs[1:]}
        beside = next((each.name for each in way.inputs[1:]), None)
        assert isinstance(site.output, Write)
        found.output = TracedWrite(site.output, _as_module(module, way), beside)
    found.values = tuple(given)
    changed = inside & varying
    begins = next(each for each in module.graph.nodes if each is node or each in changed)
    return Searched(found, tuple(given.values()), begins)


def reaches(module: GraphModule, node: Node, branch: Branch) -> bool:
    """Whether the heads' outputs of the site at `node`, which has no output projection of its own, get to the map of
    `branch`, and nowhere else.
    """
    return branch.site is None and branch.axis == -1 and _way_out(module, node, branch.node) is not None


def _way_out(module: GraphModule, node: Node, end: Node) -> _Part | None:
    """The nodes from the site at `node` to the linear map at `end`, which is the first that it comes to."""
    found: set[Node] = set()
    walk = [user for user in node.users if not _is_length(user)]
    while walk:
        each = walk.pop()
        if each in found:
            continue
        if not _can_hold(module, each) or (each.target in _MAPS and each is not end):
            return None
        found.add(each)
        walk += [] if each is end else [user for user in each.users if not _is_length(user)]
    if end not in found or len(shape_of(end)) != 3:
        return None
    varying = varying_nodes(module)
    behind = {operand: None for each in found for operand in each.all_input_nodes if operand not in found}
    lengths = {operand for operand in behind if operand in varying and _is_length(operand)}
    beside = [operand for operand in behind if operand in varying - lengths and operand is not node]
    constants = _constants(module, (operand for operand in behind if operand not in varying))
    if constants is None or len(beside) > 1:
        return None
    part = _Part((node, *beside), end, frozenset(found | constants), frozenset(lengths))
    return part if part.sound else None


def _constants(module: GraphModule, ends: Iterable[Node]) -> set[Node] | None:
    """`ends`, and what they are made of; None where a part cannot hold them."""
    found: set[Node] = set()
    walk = list(ends)
    while walk:
        node = walk.pop()
        if not _can_hold(module, node):
            return None
        found.add(node)
        walk += node.all_input_nodes
    return found


def _parts(module: GraphModule, node: Node, site: SiteModule, varying: set[Node]) -> dict[str, _Part]:
    """The parts of the roles that `site` reads as heads; none where anything else reads what a change of their maps
    changes.
    """
    roles = [role for role in ROLES if isinstance(getattr(site, role), Read)]
    ends = dict(zip(site.values, node.args, strict=True))
    traced = {role: _traced(module, ends[site.roles[role]], varying) for role in roles}  # type: ignore[arg-type]
    parts = {role: part for role, part in traced.items() if part is not None}
    nodes = {each for part in parts.values() for each in part.nodes & varying}
    inside = {node}.union(nodes, *(part.lengths for part in parts.values()))
    reads = [(each, user) for each in nodes for user in each.users if not _is_length(user)]
    others = [read for read in reads if read[1] not in inside]
    if not others:
        return parts
    places = _places(module, nodes)
    own = _channels(places, (read for read in reads if read[0] in places and read[1] in inside - places.keys()))
    theirs = _channels(places, others)
    return parts if own is not None and theirs is not None and own.isdisjoint(theirs) else {}


def _places(module: GraphModule, nodes: Collection[Node]) -> dict[Node, Any]:
    """Which channel of which of the linear maps among `nodes` stands where, at the maps and at what only moves and
    divides what they give: a number for each, of one image.
    """
    found: dict[Node, Any] = {}
    begun = 0
    for node in module.graph.nodes:
        if node in nodes and node.target is torch.ops.aten.linear.default:
            _, tokens, channels = node.meta["val"].shape
            found[node] = torch.arange(begun, begun + channels).expand(1, int(tokens), -1)
            begun += channels
        elif node.op == "call_function" and node.target in _DIVIDES and node.args[0] in found:
            args, kwargs = map_arg((node.args, node.kwargs), lambda own: 1 if _is_length(own) else found[own])
            found[node] = node.target(*args, **kwargs)
    return found


def _channels(places: dict[Node, Any], reads: Iterable[tuple[Node, Node]]) -> set[int] | None:
    """The numbers in `places` of what is read, as (node, reader); None where that is not known."""
    found: set[int] = set()
    for node, reader in reads:
        read = places.get(reader, places.get(node))
        if not isinstance(read, Tensor):
            return None
        found.update(read.unique().tolist())
    return found


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
    if len(tokens) != 1 or tokens & found or len(shape_of(*tokens)) != 3:
        return None
    part = _Part(tuple(tokens), end, frozenset(found), frozenset(lengths))
    return part if part.sound else None


def _can_hold(module: GraphModule, node: Node) -> bool:
    """Whether a part can: operations and stored tensors."""
    if node.op == "get_attr":
        return isinstance(attrgetter(str(node.target))(module), Tensor)
    return node.op == "call_function"


def _as_module(module: GraphModule, part: _Part, inside: frozenset[Node] = frozenset()) -> GraphModule:
    """`part` as a module of its inputs: matrices that nothing but `inside` reads are the graph's own. Norms and biases
    are constants: a form's maps follow them, and files store those that are ones or zeros once for many.
    """
    graph = Graph()
    made = {node: graph.placeholder(node.name) for node in part.inputs}
    batch = graph.call_function(torch.ops.aten.sym_size.int, (made[part.inputs[0]], 0))
    made |= dict.fromkeys(part.lengths, batch)
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
