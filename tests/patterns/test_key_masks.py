"""Masks of padded keys: proven from the graph, and honoured as if the padded tokens were not there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from variant_sites import make_heads, make_site

import attnrewrite as ar
from attnrewrite.passes.verify import relative_error
from attnrewrite.plan import Placement, Plan
from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Heads
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.masked import Masked
from attnrewrite.variants.registry import get_variant, variants

WEIGHING = [(name, {}) for name in variants() if getattr(type(get_variant(name)), "no_key_bias", "softmax") is None] + [
    ("l1", {"centred": False}),
    ("l1", {"single_head": True, "order": "qk"}),
    ("mobile", {"reading": "code"}),
    ("mobile", {"reading": "paper"}),
    ("separable", {"latents": 1}),
]
LABELS = [" ".join([name, *(f"{key}={value}" for key, value in options.items())]) for name, options in WEIGHING]
every_case = pytest.mark.parametrize(("name", "options"), WEIGHING, ids=LABELS)
INF = float("inf")
KEPT, TOKENS = 23, 40


def refined(name: str, options: dict, site: AttentionSite) -> nn.Module:
    form = get_variant(name, options).build(site).double()
    form.refine(lambda: iter([make_heads(site, seed=3)]))
    return form


def shortened(heads: Heads, queries: int) -> Heads:
    return Heads(heads.query[:, :, :queries], heads.key[:, :, :KEPT], heads.value[:, :, :KEPT])


def padding(masked: float = -INF) -> Tensor:
    bias = torch.zeros(1, 1, 1, TOKENS, dtype=torch.float64)
    bias[..., KEPT:] = masked
    return bias


def test_the_usual_forms_weigh_keys() -> None:
    kernels = {"relu-linear", "elu", "hedgehog", "taylor", "polynomial", "l1", "separable", "mobile", "hydra"}
    assert kernels == {name for name, _ in WEIGHING}


@every_case
@pytest.mark.parametrize("masked", [-INF, -1e5])
def test_padded_tokens_are_as_if_removed(name: str, options: dict, masked: float) -> None:
    site = make_site(n_queries=TOKENS, bias="input", bias_of_keys=True)
    form, heads = refined(name, options, site), make_heads(site)
    found = form(*heads[:3], padding(masked))[:, :, :KEPT]
    torch.testing.assert_close(found, form(*shortened(heads, KEPT)), rtol=1e-9, atol=1e-9)


@every_case
def test_padded_keys_of_another_stream(name: str, options: dict) -> None:
    """Cross-attention: keys are masked, queries are not."""
    site = make_site(n_queries=9, n_keys=TOKENS, kind="cross", bias="input", bias_of_keys=True)
    variant = get_variant(name, options)
    if variant.refuse(site) is not None:
        assert "not as many" in str(variant.refuse(site))
        return
    form, heads = refined(name, options, site), make_heads(site)
    torch.testing.assert_close(form(*heads[:3], padding()), form(*shortened(heads, 9)), rtol=1e-9, atol=1e-9)


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_where_all_keys_are_masked_nothing_is_nan(name: str, options: dict, dtype: torch.dtype) -> None:
    site = make_site(n_queries=TOKENS, bias="input", bias_of_keys=True)
    form, heads = get_variant(name, options).build(site).to(dtype), make_heads(site, dtype=dtype)
    bias = torch.cat([torch.full_like(padding(), -INF), padding()]).to(dtype)
    assert torch.isfinite(form(*heads[:3], bias)).all()
    assert not form(*heads[:3], bias)[0].any()


@pytest.mark.parametrize("name", ["relu-linear", "elu", "hedgehog"])
def test_a_bias_of_keys_weighs_them_as_in_softmax(name: str) -> None:
    """A key of bias log 2 is a key that is there twice."""
    site = make_site(n_queries=TOKENS, bias="input", bias_of_keys=True)
    form, heads = refined(name, {}, site), make_heads(site)
    bias = torch.zeros(1, 1, 1, TOKENS, dtype=torch.float64)
    bias[..., 5] = torch.tensor(2.0).double().log()
    key, value = (torch.cat([part, part[:, :, 5:6]], dim=2) for part in heads[1:3])
    torch.testing.assert_close(form(*heads[:3], bias), form(heads.query, key, value), rtol=1e-9, atol=1e-9)


def test_forms_without_a_place_for_it_say_so() -> None:
    for bias in ("input", "constant"):
        site = make_site(n_queries=TOKENS, bias=bias, bias_of_keys=True)
        for name in variants():
            variant = get_variant(name)
            if not isinstance(variant, LinearVariant) or isinstance(variant, Masked):
                continue
            reason = variant.refuse(site)
            assert (reason is None) == (variant.no_key_bias is None), name
            assert reason is None or bias == "constant" or str(variant.no_key_bias) in str(reason)
            assert reason is not None or variant.note(site) is None


class Padded(nn.Module):
    """Self-attention over [B, 12, 16] with a mask of [B, 12] in one of its spellings."""

    def __init__(self, spelling: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.proj, self.spelling = nn.Linear(16, 48), nn.Linear(16, 16), spelling

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.proj(self.spelling(query, key, value, mask).transpose(1, 2).flatten(2))


def fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])


def expanded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    whole = mask[:, None, None, :].expand(-1, 2, 12, -1).to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=(1.0 - whole) * -1e9)


def added(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    bias = (~mask).to(query.dtype)[:, None, None, :] * -1e9
    return (query @ key.mT / 3 + bias).softmax(-1) @ value


def flat(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Heads folded into the batch, the mask repeated for each."""
    bias = torch.zeros(mask.shape).masked_fill(~mask, -1e9)[:, None, None, :].expand(-1, 2, -1, -1).flatten(0, 1)
    query, key, value = (part.flatten(0, 1) for part in (query, key, value))
    return ((torch.bmm(query, key.mT) + bias).softmax(-1) @ value).unflatten(0, (-1, 2))


def flat_and_first(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """One query, as in a pool: the folded heads are split in two axes, and the axis of queries is gone."""
    return flat(query[:, :, :1], key, value, mask)


def filled(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return (query @ key.mT / 3).masked_fill(~mask[:, None, None, :], -INF).softmax(-1) @ value


def chosen(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask[:, None, None, :] == 0, -1e9, query @ key.mT / 3).softmax(-1) @ value


def on_queries(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    bias = (~mask).to(query.dtype)
    return (query @ key.mT / 3 - bias[:, None, None, :] - bias[:, None, :, None]).softmax(-1) @ value


def one_head_alone(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    first = torch.tensor([1.0, 0.0])[:, None, None]
    return (query @ key.mT / 3 + (~mask).to(query.dtype)[:, None, None, :] * -1e9 * first).softmax(-1) @ value


MASK = torch.arange(12) < torch.tensor([[12], [7]])


@pytest.mark.parametrize("spelling", [fused, expanded, added, flat, flat_and_first, filled, chosen])
@torch.no_grad()
def test_a_mask_of_keys_is_proven_and_honoured_in_a_model(spelling: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Padded(spelling).eval(), torch.randn(2, 12, 16)
    (site,) = ar.explain(model, (x, MASK)).sites
    assert (site.bias, site.bias_of_keys) == ("input", True)
    done = ar.convert(model, (x, MASK), variant="relu-linear")
    form = done.module.attention_site0.form
    query, key, value = model.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    answer = done.module(x, MASK)
    for image, kept in enumerate((12, 7)):
        short = form(*(part[image : image + 1, :, :kept] for part in (query, key, value)))
        wanted = model.proj(short.transpose(1, 2).flatten(2))[0, : answer.shape[1]]
        assert relative_error(answer[image, :kept], wanted) <= 1e-5
    assert relative_error(done.export().module()(x, MASK), answer) <= 1e-5


@pytest.mark.parametrize("spelling", [on_queries, one_head_alone])
def test_a_mask_that_is_not_of_keys_alone_is_none(spelling: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    (site,) = ar.explain(Padded(spelling).eval(), (torch.randn(2, 12, 16), MASK)).sites
    assert not site.bias_of_keys
    assert "input of the model" in str(get_variant("relu-linear").refuse(site))


def test_a_mask_of_keys_is_proven_and_honoured_in_an_onnx_graph(tmp_path: Path) -> None:
    ir, session = pytest.importorskip("onnx_ir"), pytest.importorskip("onnxruntime").InferenceSession
    torch.manual_seed(0)
    model, x = Padded(added).eval(), torch.randn(2, 12, 16)
    torch.onnx.export(model, (x, MASK), tmp_path / "model.onnx", dynamo=True, verbose=False)
    from attnrewrite.passes.onnx.rewrite import OnnxRewrite
    from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx

    original = ir.load(tmp_path / "model.onnx")
    found = scan_onnx(OnnxGraph(original), "model")
    assert found.sites[0].bias_of_keys
    plan = Plan("model", (Placement.at(found.sites[0], get_variant("taylor")),))
    ir.save(OnnxRewrite(plan).apply(original)[0], tmp_path / "taylor.onnx")
    feeds = dict(zip(("x", "mask"), (x.numpy(), MASK.numpy()), strict=True))
    (made,) = session(tmp_path / "taylor.onnx").run(None, feeds)
    with torch.no_grad():
        wanted = ar.convert(model, (x, MASK), variant="taylor").module(x, MASK)
    assert relative_error(torch.from_numpy(made), wanted) <= 1e-5
