"""What conversion proves before it hands anything out: extraction, arithmetic and export, each against a reference."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from attnrewrite.errors import CheckFailedError
from attnrewrite.passes.draws import Draw
from attnrewrite.passes.site_module import SiteModule, written_value
from attnrewrite.passes.wide import Recording, Wide, wide_copy, widened
from attnrewrite.patterns.masks import LOW
from attnrewrite.site import AttentionSite, Scan

IDENTITY_TOLERANCE = 1e-5  # float32 rounding of re-associated sums, relative to the largest element
FLOAT64_TOLERANCE = 1e-3  # what float32 may lose against the same form in float64
EXPORT_TOLERANCE = 1e-5
MOST_MISMATCH = 0.01  # of a model's integers and truths, what rounding may change where two scores are all but equal
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


def known_error(found: Tensor, wanted: Tensor) -> float:
    """`relative_error` where `wanted` is finite: what the original itself has no answer for says nothing.

    Nor does a number as large as masks are filled with that both hold: beside it, every difference would be small.
    """
    if found.shape != wanted.shape:
        return math.inf
    if wanted.numel() and bool(wanted.abs().max() < -LOW):  # all are known: NaN is below nothing
        return relative_error(found, wanted)
    known = wanted.isfinite() & ~((wanted.abs() >= -LOW) & (found == wanted))
    return relative_error(found[known], wanted[known])


@dataclass(frozen=True)
class SiteError:
    """How far a site's re-emitted softmax is from the original's value at most, on which draw, and what that means;
    `fault` is None where it is no further than IDENTITY_TOLERANCE on any.
    """

    error: float
    draw: str
    fault: str | None = None


@dataclass(frozen=True)
class Run:
    """What a graph does on a draw: its `answer`, and the `values` on the way that are to be compared, by node."""

    draw: Draw
    answer: Any
    values: Mapping[str, Any]

    @classmethod
    def of(cls, recording: Recording, draw: Draw) -> Self:
        answer = recording.run(*draw.inputs)
        return cls(draw, answer, recording.kept)


def compared_values(identity: GraphModule, scan: Scan) -> frozenset[str]:
    """The nodes of the original that `site_errors` looks at: what each rewritten site reads, and what it writes."""
    sites = rewritten_sites(identity)
    read = {value for site in sites.values() for value in site.values}
    return frozenset(read | {written_value(site) for site in scan.sites if site.id in sites})


@torch.no_grad()
def site_errors(
    original: GraphModule,
    identity: GraphModule,
    scan: Scan,
    runs: Sequence[Run],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, SiteError]:
    """For each rewritten site, how far softmax re-emitted from the extracted weights is from the original's value.

    Each site is given the original's own inputs, so that one site's error does not hide or feed another's. Where one is
    beyond the tolerance as the model computes, large scores may have been rounded: float64 decides on that draw. The
    first of `runs`, which hold the `compared_values` of `original`, is the example; where the original answers NaN, as
    it does where a mask leaves no key, nothing is compared. `progress` receives the runs done and the runs there are.
    """
    sites = rewritten_sites(identity)
    asked = [site for site in scan.sites if site.id in sites]
    errors: dict[str, list[float | None]] = {site.id: [] for site in asked}
    coarse = _in_half(original)  # its rounding hides a wrong scale
    for done, run in enumerate(runs):
        progress(done, len(runs))
        found = {} if coarse else {site.id: _site_error(sites[site.id], run, site) for site in asked}
        if coarse or not all(error is not None and error <= IDENTITY_TOLERANCE for error in found.values()):
            run = Run.of(Wide(original, compared_values(identity, scan)), run.draw)
            found = {site.id: _site_error(wide_copy(sites[site.id]), run, site) for site in asked}
        for site_id, error in found.items():
            errors[site_id].append(error)
    progress(len(runs), len(runs))
    names = [run.draw.name for run in runs]
    return {site.id: _judged(site, errors[site.id], names) for site in asked}


def _site_error(module: SiteModule, run: Run, site: AttentionSite) -> float | None:
    """None where the original has no finite value at all to compare with."""
    wanted = run.values[written_value(site)]
    if not bool(wanted.isfinite().any()):
        return None
    try:
        return known_error(module(*(run.values[value] for value in module.values)), wanted)
    except RuntimeError:  # the site does not take the sizes that it has on this draw
        return math.inf


def _judged(site: AttentionSite, errors: Sequence[float | None], draws: Sequence[str]) -> SiteError:
    told = f"{site.id} ({site.name}): softmax re-emitted from the extracted weights"
    way_out = f"keep the site with --keep {site.id}, or all such sites with --keep-bad"
    known = {draw: error for draw, error in zip(draws, errors, strict=True) if error is not None}
    if not known or (len(draws) > 1 and not set(known) - {draws[0]}):
        return SiteError(
            math.inf, draws[0], f"{told} cannot be checked: the model answers NaN on the inputs drawn; {way_out}"
        )
    worst = max(known, key=known.__getitem__)
    if known[worst] <= IDENTITY_TOLERANCE:
        return SiteError(known[worst], worst)
    hidden = worst != draws[0] and known.get(draws[0], math.inf) <= IDENTITY_TOLERANCE
    why = "the example hides it, as a mask that drops nothing or a blank picture does: " if hidden else ""
    fault = (
        f"{told} differs from the original by {known[worst]:.2e} (allowed {IDENTITY_TOLERANCE:.0e}) on {worst}: {why}"
        "something between projections and output was read otherwise than it runs, and the extraction is wrong there; "
        f"{way_out}"
    )
    return SiteError(known[worst], worst, fault)


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
        wanted = wide_copy(site)(*map(widened, given))
        errors[site_id] = relative_error(output, wanted)
        allowed = max(FLOAT64_TOLERANCE, HALF_STEPS * torch.finfo(output.dtype).eps)
        if not errors[site_id] <= allowed:
            raise CheckFailedError(
                f"{site_id}: the rewritten attention differs from its float64 reference by {errors[site_id]:.2e} "
                f"(allowed {allowed:.0e}); keep the site with --keep {site_id}, or choose another variant",
                site=site_id,
            )
    return errors


@torch.no_grad()
def export_error(exported: GraphModule, module: GraphModule, inputs: tuple[Tensor, ...]) -> float:
    """How far the exported program is from the module; in float64, where they compute in half precision.

    Raises:
        CheckFailedError: by more than EXPORT_TOLERANCE.
    """
    run = [Wide(each).run if _in_half(module) else each for each in (exported, module)]
    found, wanted = (each(*inputs) for each in run)
    pairs = zip(outputs(found), outputs(wanted), strict=True)
    error = max((relative_error(*pair) for pair in pairs), default=0.0)
    if discrete_mismatch(found, wanted) > MOST_MISMATCH:
        error = math.inf
    if not error <= EXPORT_TOLERANCE:
        raise CheckFailedError(
            f"the exported model differs from the module by {error:.2e} (allowed {EXPORT_TOLERANCE:.0e}); "
            "nothing was written"
        )
    return error


def _in_half(module: GraphModule) -> bool:
    values = (node.meta.get("val") for node in module.graph.nodes)
    return any(isinstance(value, Tensor) and value.dtype in HALF for value in values)


def discrete_mismatch(found: Any, wanted: Any) -> float:
    """The largest share of the integers, or of the truths, of a model's output that are not the same in both."""
    ones, others = _discrete(found), _discrete(wanted)
    if [each.shape for each in ones] != [each.shape for each in others]:
        return 1.0
    shares = ((one != other).double().mean() for one, other in zip(ones, others, strict=True) if one.numel())
    return max(map(float, shares), default=0.0)


def _discrete(result: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_floating_point()]


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a model's output, whatever holds them."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def outputs(result: Any) -> list[Tensor]:
    """Those of them in floating point."""
    return [tensor for tensor in tensors(result) if tensor.is_floating_point()]
