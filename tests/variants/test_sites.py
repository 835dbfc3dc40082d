"""Every form at every kind of site that the matcher finds: it stands there, batched, or says why it cannot."""

import warnings
from functools import cache

import pytest
import torch
from spellings import MIXED, SPELLINGS, build
from torch import Tensor, nn
from torch.fx import GraphModule

from attnrewrite.frontends.capture import capture
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.passes.verify import rewritten_sites
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.plan import Placement, Plan
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import get_variant, variants


class TwoImages(nn.Module):
    """One image's tokens attend to as many of another's: pixels of [B, 24, 3, 4] twice -> [B, 12, 24]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(24, 24, 1)
        self.attention = nn.MultiheadAttention(24, 4, batch_first=True)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        query, key = (self.embed(image).flatten(2).transpose(1, 2) for image in (one, other))
        return self.attention(query, key, key, need_weights=False)[0]


@cache
def site_of(kind: str) -> tuple[GraphModule, AttentionSite, tuple[Tensor, ...]]:
    """A captured model with one attention of that kind, its site, and inputs for it."""
    torch.manual_seed(0)
    if kind == "two images":
        module: nn.Module = TwoImages().eval()
        inputs: tuple[Tensor, ...] = (torch.randn(2, 24, 3, 4), torch.randn(2, 24, 3, 4))
    else:
        spelled = next(each for each in (*SPELLINGS, *MIXED) if each.name == kind)
        module, x = build(spelled)
        inputs = (x,)
    with warnings.catch_warnings(action="ignore"):
        graph = capture(kind, module, inputs).module
    (site,) = scan(FxGraph(graph), kind).sites
    return graph, site, inputs


EVERY = frozenset(variants())
LINEAR = EVERY - {"softmax"}
PAIRED = frozenset({"mobile", "additive", "xca"})
NO_GRID = {"needs tokens that are known to be an image grid": {"masked"}}
CONSTANT = {
    "adds a constant bias to its scores; approximate=true keeps a part of it": LINEAR - {"masked"},
    "adds a constant bias to its scores; approximate=true keeps it between neighbours, and a part of the rest": {
        "masked"
    },
}
FEWER = {"pairs each query with the key of the same token, and there are not as many of both": PAIRED, **NO_GRID}
OTHERS = {"pairs each query with the key of the same token, and they are of different tokens": PAIRED, **NO_GRID}
# kind of site: the reason of each variant that cannot stand there
REFUSED: dict[str, dict[str, frozenset[str] | set[str]]] = {
    "packed": NO_GRID,
    "convolutions with norm": NO_GRID,
    "rotary": NO_GRID,
    "cosine": NO_GRID,
    "multi query": NO_GRID,
    "grouped query": NO_GRID,
    "module, tokens first": NO_GRID,
    "windows before": {},
    "windows after": {},
    "window masks": CONSTANT,
    "fused with bias": CONSTANT,
    "reduced keys": FEWER,
    "pooled queries": FEWER,
    "class row": FEWER,
    "learned queries": FEWER,
    "two images": OTHERS,
    "channels": {"attends over channels, not over tokens": LINEAR},
    "scores mix heads": {"mixes the heads' scores or probabilities": EVERY},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_who_stands_at_a_site_and_why_not(kind: str) -> None:
    _, site, _ = site_of(kind)
    found: dict[str, set[str]] = {}
    for name in variants():
        reason = get_variant(name).refuse(site)
        if reason is not None:
            found.setdefault(reason.sentence, set()).add(name)
    assert found == {reason: set(names) for reason, names in REFUSED[kind].items()}


def at(graph: GraphModule, site: AttentionSite, variant: Variant) -> GraphModule:
    return FxRewrite(Plan("model", (Placement.at(site, variant),)))(graph)


def standing(name: str, site: AttentionSite) -> Variant | None:
    """The variant, without the site's bias where it cannot keep it, or None where it cannot stand there at all."""
    plain = get_variant(name)
    if plain.refuse(site) is None:
        return plain
    rough = get_variant(name, {"approximate": True}) if name != "softmax" else plain
    return rough if rough.refuse(site) is None else None


STANDING = [
    (kind, name)
    for kind, refused in REFUSED.items()
    for name in variants()
    if refused is CONSTANT or not any(name in names for names in refused.values())
    if (kind, name) != ("fused with bias", "masked")  # whose tokens are no image either
]


@pytest.mark.parametrize(("kind", "name"), STANDING)
def test_a_form_at_a_site_is_the_form_on_what_softmax_reads_there(kind: str, name: str) -> None:
    """What each form does with its heads is tested by itself: here it must get them, one image at a time."""
    graph, site, inputs = site_of(kind)
    variant = standing(name, site)
    assert variant is not None
    rewritten = at(graph, site, variant)
    (here,) = rewritten_sites(rewritten).values()
    (exact,) = rewritten_sites(at(graph, site, get_variant("softmax"))).values()
    read: list[tuple[Tensor, ...]] = []
    with torch.no_grad():
        handle = here.register_forward_pre_hook(lambda _, tensors: read.append(tensors))
        whole = rewritten(*inputs)
        handle.remove()
        heads = exact.attend_inputs(*read[0])
        assert heads[0].shape[1:] == (site.heads, site.n_queries, site.head_dim)
        assert heads[1].shape[1:] == (site.heads, site.n_keys, site.head_dim)
        assert heads[0].shape[0] == 2 * site.windows
        torch.testing.assert_close(here(*read[0]), exact.output(variant.build(site)(*heads)), rtol=1e-4, atol=1e-5)
        alone = torch.cat([rewritten(*(part[image : image + 1] for part in inputs)) for image in range(2)])
    assert torch.isfinite(whole).all()
    torch.testing.assert_close(whole, alone, rtol=1e-4, atol=1e-5)
