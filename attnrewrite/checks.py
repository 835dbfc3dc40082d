"""What conversion proves before it hands anything out: extraction, arithmetic and export, each against a reference."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter

from attnrewrite.errors import CheckFailedError
from attnrewrite.passes.rewritten import RewrittenSite, written_value
from attnrewrite.site import Scan

IDENTITY_TOLERANCE = 1e-5  # float32 rounding of re-associated sums, relative to the largest element
FLOAT64_TOLERANCE = 1e-3  # what float32 may lose against the same form in float64
EXPORT_TOLERANCE = 1e-5


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest absolute difference over the largest element of `wanted` (at least 1e-6); infinite where NaN appears."""
    difference = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-6)
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


def rewritten_sites(module: nn.Module) -> dict[str, RewrittenSite]:
    """The rewritten sites of a module, by site id, in graph order."""
    return {m.site_id: m for m in module.modules() if isinstance(m, RewrittenSite)}


class _Recorder(Interpreter):
    """Runs a graph and keeps the values that are asked for."""

    def __init__(self, module: GraphModule, names: set[str]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.names = names
        self.kept: dict[str, Tensor] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self.names:
            self.kept[n.name] = result
        return result


@contextmanager
def recorded(module: nn.Module) -> Iterator[dict[str, tuple[tuple[Tensor, ...], Tensor]]]:
    """While the block runs: the (inputs, output) of each rewritten site's last call."""
    calls: dict[str, tuple[tuple[Tensor, ...], Tensor]] = {}

    def keep(site: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(site, RewrittenSite)
        calls[site.site_id] = (inputs, output)

    hooks = [site.register_forward_hook(keep) for site in rewritten_sites(module).values()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def identity_errors(
    original: GraphModule, identity: GraphModule, scan: Scan, inputs: tuple[Tensor, ...]
) -> dict[str, float]:
    """For each rewritten site, how far softmax re-emitted from the extracted weights is from the original's value.

    Each site is given the original's own inputs, so that one site's error does not hide or feed another's.

    Raises:
        CheckFailedError: a site is off by more than IDENTITY_TOLERANCE: the extraction is wrong.
    """
    sites = rewritten_sites(identity)
    wanted = {site.id: written_value(site) for site in scan.sites if site.id in sites}
    read = {value for site in sites.values() for value in site.values}
    recorder = _Recorder(original, {*wanted.values(), *read})
    recorder.run(*inputs)
    errors = {}
    for site in scan.sites:
        if site.id not in sites:
            continue
        module = sites[site.id]
        found = module(*(recorder.kept[value] for value in module.values))
        errors[site.id] = relative_error(found, recorder.kept[wanted[site.id]])
        if not errors[site.id] <= IDENTITY_TOLERANCE:
            raise CheckFailedError(
                f"{site.id} ({site.name}): softmax re-emitted from the extracted weights differs from the original by "
                f"{errors[site.id]:.2e} (allowed {IDENTITY_TOLERANCE:.0e}): the extraction is wrong there; "
                f"keep the site with --keep {site.id}"
            )
    return errors


@torch.no_grad()
def float64_errors(student: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """For each rewritten site, how far its float32 output is from the same form's in float64, on the same inputs.

    Raises:
        CheckFailedError: a site is off by more than FLOAT64_TOLERANCE, or makes NaN or infinity.
    """
    with recorded(student) as calls:
        student(*inputs)
    errors = {}
    for site_id, site in rewritten_sites(student).items():
        given, output = calls[site_id]
        wanted = copy.deepcopy(site).double()(*(t.double() if t.is_floating_point() else t for t in given))
        errors[site_id] = relative_error(output, wanted)
        if not errors[site_id] <= FLOAT64_TOLERANCE:
            raise CheckFailedError(
                f"{site_id}: the rewritten attention differs from its float64 reference by {errors[site_id]:.2e} "
                f"(allowed {FLOAT64_TOLERANCE:.0e}); keep the site with --keep {site_id}, or choose another variant"
            )
    return errors


@torch.no_grad()
def export_error(exported: nn.Module, module: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    """How far the exported program is from the module.

    Raises:
        CheckFailedError: by more than EXPORT_TOLERANCE.
    """
    pairs = zip(outputs(exported(*inputs)), outputs(module(*inputs)), strict=True)
    error = max(relative_error(found, wanted) for found, wanted in pairs)
    if not error <= EXPORT_TOLERANCE:
        raise CheckFailedError(
            f"the exported model differs from the module by {error:.2e} (allowed {EXPORT_TOLERANCE:.0e}); "
            "nothing was written"
        )
    return error


def outputs(result: Any) -> list[Tensor]:
    """The floating-point tensors of a model's output, whatever holds them."""
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
