"""The detection benchmark's truth is right on modules that fit on a screen; its zoo agrees with explain."""

import importlib
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnrewrite as ar

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NO_PRODUCT, NO_VALUE, MIXES_IMAGES = (
    "its input is no product",
    "no product sums values over its axis",
    "its keys belong to different images",
)


@pytest.fixture(scope="module")
def benchmark(request: pytest.FixtureRequest) -> dict[str, ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    request.addfinalizer(lambda: sys.path.remove(str(BENCHMARKS)))  # noqa: PT021 (the path is needed until the end)
    return {name: importlib.import_module(name) for name in ("detection", "detectors.truth", "zoo", "zoo.runs")}


class Attend(nn.Module):
    """[B, 6, 8] tokens through `rule(query, key, value, itself)`; every map has the width 8."""

    def __init__(self, rule: object) -> None:
        super().__init__()
        self.rule = rule
        self.maps = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.mix, self.gate = nn.Linear(2, 2), nn.Linear(8, 4)
        self.learnt = nn.Parameter(torch.randn(3, 8))
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(*(linear(x) for linear in self.maps), self)  # type: ignore[operator]


def heads(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1, 2, 4).transpose(1, 2)


def split(q: Tensor, k: Tensor, v: Tensor, m: Attend) -> Tensor:
    return (heads(q) @ heads(k).mT * 0.5).softmax(-1) @ heads(v)


def through_norm(q: Tensor, k: Tensor, v: Tensor, m: Attend) -> Tensor:
    return (F.layer_norm(q @ k.mT, (6,))).softmax(-1) @ v


def mixed_heads(q: Tensor, k: Tensor, v: Tensor, m: Attend) -> Tensor:
    scores = m.mix((heads(q) @ heads(k).mT).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return scores.softmax(-1) @ heads(v)


def turned(q: Tensor, k: Tensor, v: Tensor, m: Attend) -> Tensor:
    return torch.einsum("bki,bkd->bid", torch.einsum("bkd,bid->bki", k, q[:, :5]).softmax(1), v)


def routed(q: Tensor, k: Tensor, v: Tensor, m: Attend) -> Tensor:
    weight, expert = m.gate(q).softmax(-1).topk(2)
    return (weight.sum(-1, keepdim=True) * v) + expert.sum()


# rule -> (axis, queries, keys, width) of each site, and the reasons of the rest
TOKENS = ("token", 6, 6, 8)
CASES = {
    "matmul": (lambda q, k, v, m: (q @ k.mT).softmax(-1) @ v, [TOKENS], []),
    "heads": (split, [("token", 6, 6, 4)], []),
    "einsum over rows": (turned, [("token", 5, 6, 8)], []),
    "fused": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v), [TOKENS], []),
    "nn.MultiheadAttention": (lambda q, k, v, m: m.mha(q, k, v)[0], [("token", 6, 6, 4)], []),
    "a learnt query": (lambda q, k, v, m: (m.learnt @ k.mT).softmax(-1) @ v, [("token", 3, 6, 8)], []),
    "heads mixed in the scores": (mixed_heads, [("token", 6, 6, 4)], []),
    "a mask written into the scores": (
        lambda q, k, v, m: (q @ k.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9).softmax(-1) @ v, [TOKENS], [],
    ),
    "over channels": (lambda q, k, v, m: (q.mT @ k).softmax(-1) @ v.mT, [("channel", 8, 8, 6)], []),
    "over channels, fused": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q.mT, k.mT, v.mT), [("channel", 8, 8, 6)], [],
    ),
    "over images": (
        lambda q, k, v, m: (q.transpose(0, 1) @ k.permute(1, 2, 0)).softmax(-1) @ v.transpose(0, 1), [], [MIXES_IMAGES],
    ),
    "squeeze and excite": (lambda q, k, v, m: q.mean(1, keepdim=True).softmax(-1) * v, [], [NO_PRODUCT]),
    "sequence pooling": (lambda q, k, v, m: q[..., :1].softmax(1).mT @ v, [], [NO_PRODUCT]),
    "a router": (routed, [], [NO_PRODUCT]),
    "slots, normalised over the queries": (
        lambda q, k, v, m: (m.learnt @ k.mT).softmax(1) @ v, [], [NO_VALUE],
    ),
    "scores alone": (lambda q, k, v, m: (q @ k.mT).softmax(-1), [], [NO_VALUE]),
    "two side by side": (lambda q, k, v, m: split(q, k, v, m) + split(v, q, k, m), [("token", 6, 6, 4)] * 2, []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_truth_of(name: str, benchmark: dict[str, ModuleType]) -> None:
    rule, sites, reasons = CASES[name]
    torch.manual_seed(0)
    events = benchmark["detectors.truth"].record(Attend(rule).eval(), (torch.randn(2, 6, 8),))
    assert [(e.axis, e.n_queries, e.n_keys, e.width) for e in events if e.is_site] == sites
    assert [e.reason for e in events if not e.is_site] == reasons


def event(queries: int, keys: int, axis: str | None = "token", reason: str | None = None) -> dict[str, object]:
    return {"n_queries": queries, "n_keys": keys, "axis": axis, "reason": reason}


def test_a_score_counts_what_is_found_invented_and_mistaken(benchmark: dict[str, ModuleType]) -> None:
    detection = benchmark["detection"]
    truth = detection.Sites.of([event(6, 6), event(6, 6), event(8, 8, "channel"), event(0, 0, reason=NO_PRODUCT)])
    assert (truth.tokens.total(), truth.channels.total(), truth.others) == (2, 1, 1)

    def scored(*reported: dict[str, object]) -> tuple[int, int, int, bool]:
        score = detection.Score.of(truth, reported)
        return score.found, score.false, score.channels, score.right_sizes

    assert scored(event(6, 6), event(6, 6), event(8, 8, "channel")) == (2, 0, 1, True)
    assert scored(event(6, 6, None), event(8, 8, None)) == (1, 1, 0, False)  # channels taken for tokens
    assert scored(*[event(6, 6)] * 3) == (2, 1, 0, False)
    assert scored() == (0, 0, 0, False)


def test_an_unknown_name_is_told_the_nearest(benchmark: dict[str, ModuleType]) -> None:
    with pytest.raises(ar.errors.InputError, match="did you mean 'timm/cait'"):
        benchmark["zoo.runs"].chosen("model", ["timm/cairt"], benchmark["zoo"].names())


def test_the_zoo_is_wide(benchmark: dict[str, ModuleType]) -> None:
    names = benchmark["zoo"].names()
    assert len(names) >= 60
    assert len({name.lower() for name in names}) == len(names)
    assert {name.partition("/")[0] for name in names} == {"timm", "transformers", "torchvision", "vit_pytorch"}


@pytest.mark.parametrize("name", ["torchvision/vit", "vit_pytorch/deepvit", "vit_pytorch/xcit"])
def test_a_small_model_is_scanned_to_the_recorded_truth(name: str, benchmark: dict[str, ModuleType]) -> None:
    if find_spec(name.partition("/")[0]) is None:
        pytest.skip(f"{name.partition('/')[0]} is not installed")
    truth = benchmark["detectors.truth"].record(*benchmark["zoo"].build(name))
    sites = ar.explain(*benchmark["zoo"].build(name)).sites
    recorded = Counter((e.axis, e.n_queries, e.n_keys) for e in truth if e.is_site)
    assert recorded
    assert Counter((site.axis, site.n_queries, site.n_keys) for site in sites) == recorded
