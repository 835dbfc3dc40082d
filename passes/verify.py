"""What conversion proves before it hands anything out: extraction, arithmetic and export, each against a reference."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_map

from attnrewrite.errors import CheckFailedError
from attnrewrite.passes.copying import quiet_copying
from attnrewrite.passes.site_module import SiteModule, written_value
from attnrewrite.site import Scan

IDENTITY_TOLERANCE = 1e-5  # float32 rounding of re-associated sums, relative to the largest element
FLOAT64_TOLERANCE = 1e-3  # what float32 may lose against the same form in float64
EXPORT_TOLERANCE = 1e-5
HALF_STEPS = 8  # roundings of half precision that a site's projections and form may add up to
HALF = (torch.float16, torch.bfloat16)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest absolute difference over the largest element of `wanted` (at least 1e-6); infinite where NaN appears."""
    if not wanted.numel():
        return 0.0
    found, wanted = found.detach().double(), wanted.detach().double()
    difference = (found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


def rewritten_sites(module: nn.Module) -> dict[str, SiteModule]:
    """The rewritten sites of a module, by site id, in graph order."""
    return {m.site_id: m for m in module.modules() if isinstance(m, SiteModule)}


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
        assert isinstance(site, SiteModule)
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

    Each site is given the original's own inputs, so that one site's error does not hide or feed another's. What is
    computed in half precision is compared in float32: its own rounding would hide a wrong bias or scale.

    Raises:
        CheckFailedError: a site is off by more than IDENTITY_TOLERANCE: the extraction is wrong.
    """
    if _in_half(original):
        original, identity, inputs = _widened(original), _widened(identity), _wide(inputs)
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


def _in_half(module: GraphModule) -> bool:
    values = (node.meta.get("val") for node in module.graph.nodes)
    return any(isinstance(value, Tensor) and value.dtype in HALF for value in values)


def _wide(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.float() if tensor.dtype in HALF else tensor for tensor in inputs)


def _widened(module: GraphModule) -> GraphModule:
    """A copy that computes in float32 what `module` computes in half precision."""
    with quiet_copying():
        wide = copy.deepcopy(module)
    wide._apply(lambda tensor: tensor.float() if tensor.dtype in HALF else tensor)
    for node in wide.graph.nodes:
        given = node.args, node.kwargs
        node.args, node.kwargs = tree_map(lambda leaf: torch.float32 if leaf in HALF else leaf, given)
    wide.recompile()
    return wide


@torch.no_grad()
def float64_errors(student: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """For each rewritten site, how far its output is from the same form's in float64, on the same inputs.

    Raises:
        CheckFailedError: a site is off by more than FLOAT64_TOLERANCE, in half precision by more than HALF_STEPS of its
            rounding, or makes NaN or infinity.
    """
    with recorded(student) as calls:
        student(*inputs)
    errors = {}
    for site_id, site in rewritten_sites(student).items():
        given, output = calls[site_id]
        wanted = copy.deepcopy(site).double()(*(t.double() if t.is_floating_point() else t for t in given))
        errors[site_id] = relative_error(output, wanted)
        allowed = max(FLOAT64_TOLERANCE, HALF_STEPS * torch.finfo(output.dtype).eps)
        if not errors[site_id] <= allowed:
            raise CheckFailedError(
                f"{site_id}: the rewritten attention differs from its float64 reference by {errors[site_id]:.2e} "
                f"(allowed {allowed:.0e}); keep the site with --keep {site_id}, or choose another variant"
            )
    return errors


@torch.no_grad()
def export_error(exported: GraphModule, module: GraphModule, inputs: tuple[Tensor, ...]) -> float:
    """How far the exported program is from the module; in float32, where they compute in half precision.

    Raises:
        CheckFailedError: by more than EXPORT_TOLERANCE.
    """
    if _in_half(module):
        exported, module, inputs = _widened(exported), _widened(module), _wide(inputs)
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
