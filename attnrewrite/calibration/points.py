"""The places of a student that are fitted, in the order of its graph."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule, Node

from attnrewrite.calibration.branches import Branch, branches
from attnrewrite.calibration.projections import ROLES, with_projections
from attnrewrite.calibration.segments import rewritten_site
from attnrewrite.passes.site_module import SiteModule

Undo = Callable[[], None]


@dataclass(frozen=True)
class Point:
    """A node of the student that is fitted: a site's form and its `projections`, the map that ends a residual branch,
    or both at once. A search of the site `reads` the values of these nodes.
    """

    node: Node
    site: SiteModule | None
    branch: Branch | None
    projections: tuple[nn.Parameter, ...] = ()
    reads: tuple[Node, ...] = ()

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
    return [
        Point(node, site, ends.get(node), *(() if site is None else _searched(student, node)))
        for node, site in sites.items()
        if site is not None or node in ends
    ]


def _searched(student: GraphModule, node: Node) -> tuple[tuple[nn.Parameter, ...], tuple[Node, ...]]:
    """The weights of the projections that a search changes at `node`, each once, and what it reads."""
    site, reads = with_projections(student, node)
    readers = (getattr(site, role) for role in ROLES)
    return tuple(dict.fromkeys(own for reader in readers for own in reader.parameters())), reads
