"""The projections that a site's module does not hold, as something lies between them and the attention: a rotary
embedding, a normalisation of queries or of the result, a gate. A search goes through that part of the graph, and
changes the projections of query, key and value there.
"""

import copy
from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from attnrewrite.calibration.branches import Branch
from attnrewrite.calibration.parts import Part, back_from, is_length, on_to, read_apart
from attnrewrite.calibration.way import map_axis, varying_nodes
from attnrewrite.passes.site_module import Read, SiteModule, Write, read, write

ROLES = ("query", "key", "value")


class TracedRead(nn.Module):
    """The part of a graph that makes the heads' queries, keys or values of tokens [B, ..., C], or of pixels, whose
    channels lie along `axis`; the tokens' own axes are `places` long, the first -1.
    """

    def __init__(self, own: Read, part: GraphModule, axis: int, places: tuple[int, ...], heads: int) -> None:
        super().__init__()
        self.layout = own.layout
        self.axis, self.places = axis, places
        self.heads = heads
        self.part = part

    def tokens(self, tensor: Tensor) -> Tensor:
        """[B, N, C]."""
        return tensor.movedim(self.axis, -1).flatten(1, -2)

    def project(self, tokens: Tensor) -> Tensor:
        """[B, N, C] -> [B, heads, N, channels]."""
        return read(self.part(tokens.unflatten(1, self.places).movedim(-1, self.axis)), self.layout)

    def forward(self, tensor: Tensor) -> Tensor:
        return self.project(self.tokens(tensor))


class TracedWrite(nn.Module):
    """The part of a graph that makes what a map along `axis` gives [B, N, outputs] of the heads' outputs, and of the
    value called `beside`, if it reads another.
    """

    def __init__(self, own: Write, part: GraphModule, axis: int, beside: str | None) -> None:
        super().__init__()
        self.layout = own.layout
        self.part = part
        self.axis = axis
        self.beside = beside

    def forward(self, heads: Tensor, beside: Tensor | None = None) -> Tensor:
        others = () if beside is None else (beside,)
        made: Tensor = self.part(write(heads, self.layout), *others)
        return made.movedim(self.axis, -1).flatten(1, -2)


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
    parts = _projected(module, node, site, varying)
    inside = frozenset().union(*(part.nodes for part in parts.values()))
    for role, part in parts.items():
        (tokens,) = part.inputs
        given[tokens.name] = tokens
        found.roles[role] = tokens.name
        traced = part.as_module(module, inside)
        setattr(found, role, TracedRead(getattr(site, role), traced, *_axis_and_places(part), site.heads))
    way = None if reached is None else on_to(module, node, reached.node)
    if reached is not None and way is not None:
        given |= {each.name: each for each in way.inputs[1:]}
        beside = next((each.name for each in way.inputs[1:]), None)
        assert isinstance(site.output, Write)
        found.output = TracedWrite(site.output, way.as_module(module), reached.axis, beside)
    found.values = tuple(given)
    changed = {each for each in inside & varying if not is_length(each)}
    begins = next(each for each in module.graph.nodes if each is node or each in changed)
    return Searched(found, tuple(given.values()), begins)


def _axis_and_places(part: Part) -> tuple[int, tuple[int, ...]]:
    """The axis of what a part reads that its maps work on, and how long the other axes are, the first of them -1."""
    (tokens,) = part.inputs
    axis = next(axis for user in tokens.users if user in part.nodes and (axis := map_axis(user)) is not None)
    lengths = tokens.meta["val"].movedim(axis, -1).shape[1:-1]
    return axis, (-1, *map(int, lengths[1:]))


def reaches(module: GraphModule, node: Node, branch: Branch) -> bool:
    """Whether the heads' outputs of the site at `node`, which has no output projection of its own, get to the map of
    `branch`, and nowhere else.
    """
    return branch.site is None and on_to(module, node, branch.node) is not None


def _projected(module: GraphModule, node: Node, site: SiteModule, varying: Collection[Node]) -> dict[str, Part]:
    """The parts of roles that `site` reads as heads: the most of them together whose maps may change without a change
    of what others read.
    """
    roles = [role for role in ROLES if isinstance(getattr(site, role), Read)]
    ends = dict(zip(site.values, node.args, strict=True))
    traced = {role: back_from(module, ends[site.roles[role]], varying) for role in roles}  # type: ignore[arg-type]
    parts = [(role, part) for role, part in traced.items() if part is not None]
    for count in range(len(parts), 0, -1):
        for some in map(dict, combinations(parts, count)):
            if read_apart(module, some.values(), node, varying):
                return some
    return {}
