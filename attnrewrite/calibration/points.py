"""The places of a student that are fitted, in the order of its graph."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import nn
from torch.fx import GraphModule, Node

from attnrewrite.calibration.branches import Branch, branches
from attnrewrite.calibration.projections import reaches, with_projections
from attnrewrite.calibration.segments import rewritten_site
from attnrewrite.passes.site_module import SiteModule, Write

Undo = Callable[[], None]


@dataclass(frozen=True)
class Point:
    """A node of the student that is fitted: a site's form and its `projections`, which change the graph from `begins`
    on; the map that ends a residual branch; or both at once. A site that has no map of its own may have `reached` that
    of a branch, which is fitted next.
    """

    node: Node
    site: SiteModule | None
    branch: Branch | None
    begins: Node
    projections: tuple[nn.Parameter, ...] = ()
    reached: Branch | None = None

    @property
    def site_id(self) -> str | None:
        return None if self.site is None else self.site.site_id

    @property
    def name(self) -> str:
        return self.site_id or self.node.name

    @property
    def stream(self) -> Node:
        return self.branch.stream if self.branch is not None else self.node

    @property
    def channels(self) -> int:
        """Of all heads of a site together; 0 where there is none."""
        if self.site is None:
            return 0
        if self.branch is not None:
            return self.branch.weight.shape[1]
        assert isinstance(self.site.output, Write), "a site that has an output projection is a branch"
        layout = self.site.output.layout
        return layout.count(layout.heads) * layout.count(layout.channels)

    @property
    def outputs(self) -> int:
        """The channels that a site gives of a token; 0 where there is none."""
        return self.channels if self.site is None or self.branch is None else self.branch.weight.shape[0]

    @property
    def alone(self) -> bool:
        """Whether no addition takes what is fitted here into a stream."""
        return self.stream is self.node

    @property
    def saved_bytes(self) -> int:
        """What `undo` holds."""
        form = () if self.site is None else tuple(self.site.form.parameters())
        mapped = 0 if self.branch is None else self.branch.weight.nbytes
        return mapped + sum(own.nbytes for own in (*form, *self.projections))

    def undo(self) -> Undo:
        """What puts the point back to where it stands now."""
        form = None if self.site is None else copy.deepcopy(self.site.form)
        projections = [(own, own.detach().clone()) for own in self.projections]
        change = None if self.branch is None else self.branch.saved()

        def restore() -> None:
            if self.site is not None and form is not None:
                self.site.form = form
            with torch.no_grad():
                for own, saved in projections:
                    own.copy_(saved)
            if change is not None:
                change()

        return restore


def fit_points(student: GraphModule) -> list[Point]:
    """Every point to fit, in the order of the graph."""
    ends = {branch.node: branch for branch in branches(student)}
    sites = {node: rewritten_site(student, node) for node in student.graph.nodes}
    nodes = [node for node, site in sites.items() if site is not None or node in ends]
    return [
        Point(node, None, ends[node], node)
        if (site := sites[node]) is None
        else _of_site(student, node, site, ends, after)
        for node, after in zip_longest(nodes, nodes[1:])
    ]


def _of_site(student: GraphModule, node: Node, site: SiteModule, ends: dict[Node, Branch], after: Node | None) -> Point:
    """The point of a site, and `after` is the next one's node."""
    branch, following = ends.get(node), ends.get(after) if after is not None else None
    near = branch is None and following is not None and reaches(student, node, following)
    reached = following if near else None
    searched = with_projections(student, node, reached)
    return Point(node, site, branch, searched.begins, searched.projections, reached)
