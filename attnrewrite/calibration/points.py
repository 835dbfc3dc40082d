"""The places of a student that are fitted, in the order of its graph."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import nn
from torch.fx import GraphModule, Node

from attnrewrite.calibration.branches import Branch, branches
from attnrewrite.calibration.projections import ROLES, reaches, with_projections
from attnrewrite.calibration.segments import rewritten_site
from attnrewrite.passes.site_module import SiteModule

Undo = Callable[[], None]


@dataclass(frozen=True)
class Point:
    """A node of the student that is fitted: a site's form and its `projections`, the map that ends a residual branch,
    or both at once. A search of the site `reads` the values of these nodes; where the site has no map of its own, it
    may be that of the branch that it has `reached`, which is fitted next.
    """

    node: Node
    site: SiteModule | None
    branch: Branch | None
    projections: tuple[nn.Parameter, ...] = ()
    reads: tuple[Node, ...] = ()
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
        Point(node, None, ends[node]) if (site := sites[node]) is None else _of_site(student, node, site, ends, after)
        for node, after in zip_longest(nodes, nodes[1:])
    ]


def _of_site(student: GraphModule, node: Node, site: SiteModule, ends: dict[Node, Branch], after: Node | None) -> Point:
    """The point of a site, which `after` is the next of, with the weights of the projections that a search changes,
    each once, and what it reads.
    """
    branch, following = ends.get(node), ends.get(after) if after is not None else None
    near = branch is None and following is not None and reaches(student, node, following)
    reached = following if near else None
    searched, reads = with_projections(student, node, reached)
    readers = (getattr(searched, role) for role in ROLES)
    projections = tuple(dict.fromkeys(own for reader in readers for own in reader.parameters()))
    return Point(node, site, branch, projections, reads, reached)
