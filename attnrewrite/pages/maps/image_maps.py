"""What each site makes of one image's tokens, before and after conversion: the numbers behind `explain --image`.

A form says itself what is worth looking at (`Form.token_maps`); here the model is run, and the tokens are laid out on
the site's grid.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule

from attnrewrite.errors import InputError
from attnrewrite.frontends.capture import capture
from attnrewrite.frontends.sources import Source
from attnrewrite.images.dataset import Files
from attnrewrite.images.decode import read_picture
from attnrewrite.pages.maps.windows import WindowPlaces, window_places
from attnrewrite.passes.fx.join_heads import with_joined_heads
from attnrewrite.passes.fx.rewrite import FxRewrite, scan_graph
from attnrewrite.passes.verify import recorded, rewritten_sites
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import Scanned
from attnrewrite.plan import Placement, Plan
from attnrewrite.site import AttentionSite, Grid, Scan
from attnrewrite.variants.base import Heads
from attnrewrite.variants.registry import get_variant


@dataclass(frozen=True)
class TokenMap:
    """One map of a site: `image` [maps, rows, columns], and `prefix` [maps, tokens] of the tokens before the image's.

    There is one map for each head of the form, or one for all of them.
    """

    title: str
    image: np.ndarray
    prefix: np.ndarray


@dataclass(frozen=True)
class FormMaps:
    """What stands at a site and its maps; `reason` says why there are none."""

    form: str
    maps: tuple[TokenMap, ...]
    reason: str | None = None


@dataclass(frozen=True)
class SiteMaps:
    """One site before and, where the model was converted, after."""

    site: AttentionSite
    before: FormMaps
    after: FormMaps | None


@dataclass(frozen=True)
class ImageMaps:
    """Every site of a model on one image. `pixels` is the image as the model sees it, uint8 [H, W, C]."""

    model: str
    image: str
    pixels: np.ndarray
    sites: tuple[SiteMaps, ...]


def image_maps(source: Source, image: Path, original: Source | None = None) -> ImageMaps:
    """The maps of every site of a model; of a converted folder, those of the model it was made from beside its own.

    `original` is that model, where the folder's own report is not to be asked for it.

    Raises:
        InputError: the image or the model cannot be used, or the original of a converted folder is gone.
    """
    plan, original = _plan_and_original(source, original)
    Files((image,), str(image)).check(original.preprocessing, original.input_size)
    assert original.preprocessing is not None, "checked"
    pixels = read_picture(image, original.preprocessing, original.input_size)
    captured = capture(original.name, original.model or original.program, original.example_inputs)  # type: ignore[arg-type]
    if not captured.exact:
        raise InputError(f"{captured.note}; its attention on another image cannot be computed")
    taken = original.preprocessing(torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None])
    inputs = (taken, *original.example_inputs[1:])
    scanned, batch = scan_graph(captured.module, original.name), captured.fixed_batch or 1
    scanned = scanned if plan is None else with_joined_heads(scanned, plan.groups)
    found = scanned.scan
    laid = {site.id: _layout(scanned.graph, site) for site in found.sites}
    before = dict(_run(scanned, _softmax_plan(found), inputs, batch))
    after = None if plan is None else dict(_run(*_completed(scanned, plan), inputs, batch))
    names = {} if plan is None else {placement.site: placement.variant.name for placement in plan.placements}
    return ImageMaps(
        source.name,
        image.name,
        pixels,
        tuple(
            SiteMaps(
                site,
                _form_maps("softmax", laid[site.id], before.get(site.id)),
                None if after is None else _form_maps(names.get(site.id, "softmax"), laid[site.id], after.get(site.id)),
            )
            for site in found.sites
        ),
    )


def _plan_and_original(source: Source, original: Source | None) -> tuple[Plan | None, Source]:
    if source.folder is None:
        return None, source
    original = original or source.original()
    return Plan.load(source.folder), replace(original, preprocessing=source.preprocessing or original.preprocessing)


def _softmax_plan(found: Scan) -> Plan:
    """Softmax re-emitted at every site whose queries and keys can be read."""
    softmax = get_variant("softmax")
    return Plan(found.model, tuple(Placement.at(site, softmax) for site in found.sites if not softmax.refuse(site)))


def _completed(scanned: Scanned[FxGraph], plan: Plan) -> tuple[Scanned[FxGraph], Plan]:
    """The model with what the plan refits in it, and the plan's sites with softmax at those that it leaves."""
    rewritten = FxRewrite(replace(plan, placements=()), scanned)(scanned.graph.module)
    refitted = replace(scanned, graph=FxGraph(rewritten))  # other weights, the same sites
    own = {placement.site: placement for placement in plan.placements}
    kept = {each.site: each for each in _softmax_plan(refitted.scan).placements}
    return refitted, replace(plan, placements=tuple((kept | own).values()), parameters={})


@torch.no_grad()
def _run(
    scanned: Scanned[FxGraph], plan: Plan, inputs: tuple[Tensor, ...], batch: int
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """For each site of the plan, its form's maps by name, [batch, maps, tokens]; windows are in the batch."""
    module: GraphModule = FxRewrite(plan, scanned)(scanned.graph.module)
    first = inputs[0].expand(batch, *inputs[0].shape[1:])
    with recorded(module) as calls:
        module(first, *(tensor[:1].expand(batch, *tensor.shape[1:]) for tensor in inputs[1:]))
    for site_id, rewritten in rewritten_sites(module).items():
        heads = Heads(*rewritten.attend_inputs(*calls[site_id][0]))
        yield site_id, rewritten.form.token_maps(heads)


def _layout(graph: FxGraph, site: AttentionSite) -> Grid | WindowPlaces | str:
    """How the site's tokens lie in the image, or why that cannot be drawn."""
    if reason := get_variant("softmax").refuse(site):
        return reason.sentence
    if site.axis == "channel":
        return "attends over channels, not over tokens"
    if site.windowed:
        return window_places(graph, site)
    return site.grid or "attends over tokens that are not known to be an image"


def _form_maps(form: str, laid: Grid | WindowPlaces | str, maps: dict[str, Tensor] | None) -> FormMaps:
    if isinstance(laid, str):
        return FormMaps(form, (), f"it {laid}")
    if not maps:
        return FormMaps(form, (), f"{form} gives no number to each token")
    return FormMaps(form, tuple(_on_image(name, values.float().cpu().numpy(), laid) for name, values in maps.items()))


def _on_image(name: str, numbers: np.ndarray, laid: Grid | WindowPlaces) -> TokenMap:
    """[batch, maps, tokens] of the first image."""
    if isinstance(laid, WindowPlaces):
        own = numbers if len(numbers) == len(laid.place) else numbers[laid.first]
        return TokenMap(name, laid.lay_out(own), numbers[0, :, :0])
    image = numbers[0, :, laid.prefix :].reshape(-1, laid.rows, laid.columns)
    return TokenMap(name, image, numbers[0, :, : laid.prefix])
