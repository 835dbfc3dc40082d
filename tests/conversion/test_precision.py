"""Models that are not in float32: rewritten, checked and exported in their own precision."""

import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from identity import identity_errors
from tiny_vits import INPUTS, encoder
from torch import Tensor, nn
from torch.fx import GraphModule

import attnrewrite as ar
from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.frontends.capture import capture
from attnrewrite.passes.draws import drawn
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.passes.verify import float64_errors, relative_error
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.plan import Placement, Plan
from attnrewrite.site import Scan
from attnrewrite.variants.registry import get_variant, variants

ROUNDING = {torch.float64: 1e-6, torch.float16: 1e-2, torch.bfloat16: 8e-2}  # of logits, through two blocks
every_type = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


class Mixed(nn.Module):
    """Attention computed in float32 inside a model in half precision, with a bias for every two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(9, 9))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).float().unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        scores = query @ key.mT / 3 + self.table.float()
        return self.proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2).to(x.dtype))


@cache
def captured(dtype: torch.dtype) -> tuple[GraphModule, Scan]:
    module = capture("encoder", encoder().to(dtype), (INPUTS[0].to(dtype),)).module
    return module, scan(FxGraph(module), "encoder")


def rewritten(dtype: torch.dtype, name: str) -> GraphModule:
    module, found = captured(dtype)
    return FxRewrite(Plan(found.model, tuple(Placement.at(site, get_variant(name)) for site in found)))(module)


@every_type
@pytest.mark.parametrize("name", variants())
@torch.no_grad()
def test_every_variant_stands_in_every_precision(name: str, dtype: torch.dtype) -> None:
    student, wanted = rewritten(dtype, name), rewritten(torch.float32, name)
    assert {parameter.dtype for parameter in student.parameters()} == {dtype}
    found = student(INPUTS[0].to(dtype))
    assert found.dtype == dtype
    assert relative_error(found, wanted(INPUTS[0])) <= ROUNDING[dtype]
    float64_errors(student, (INPUTS[0].to(dtype),))


@every_type
def test_a_saved_conversion_and_its_plan_give_the_same_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    inputs = (INPUTS[0].to(dtype),)
    done = ar.convert(encoder().to(dtype), inputs, variant="relu-linear", options={"local": True})
    saved = torch.export.load(done.save(tmp_path / "out") / "model.pt2").module()
    assert relative_error(saved(*inputs), done.module(*inputs)) <= 8 * torch.finfo(dtype).eps
    again = FxRewrite(Plan.load(tmp_path / "out"))(capture("encoder", encoder().to(dtype), inputs).module)
    assert torch.equal(again(*inputs), done.module(*inputs))


@every_type
def test_explain_reads_the_same_model(dtype: torch.dtype) -> None:
    wanted, found = ar.explain(encoder(), INPUTS), ar.explain(encoder().to(dtype), (INPUTS[0].to(dtype),))
    assert [(s.name, s.heads, s.grid, s.scale) for s in found] == [(s.name, s.heads, s.grid, s.scale) for s in wanted]


@every_type
def test_a_wrong_scale_is_seen_in_every_precision(dtype: torch.dtype) -> None:
    """One in a thousand is below bfloat16's own rounding: the check must not be."""
    inputs = (INPUTS[0].to(dtype),)
    original, found = captured(dtype)
    identity = rewritten(dtype, "softmax")
    assert max(identity_errors(original, identity, found, drawn(original, inputs)).values()) <= 1e-5
    wrong = copy.deepcopy(identity)
    wrong.attention_site0.form.scale *= 1.001
    with pytest.raises(CheckFailedError, match="the extraction is wrong"):
        identity_errors(original, wrong, found, drawn(original, inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_in_float32_inside_a_model_in_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Mixed().eval().to(dtype), torch.randn(2, 9, 16).to(dtype)
    done = ar.convert(model, (x,), variant="softmax")
    assert done.report["sites"][0]["identity_error"] <= 1e-5
    assert relative_error(done.module(x), model(x)) <= 8 * torch.finfo(dtype).eps


class Scaled(Mixed):
    """Queries times a number that no type of half precision holds, and no table."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.proj(((query * 8**-0.5 @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_weights_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Scaled().eval().to(dtype), torch.randn(2, 9, 16).to(dtype)
    done = ar.convert(model, (x,), variant="softmax")
    assert done.report["sites"][0]["identity_error"] <= 1e-5
    reader = done.module.attention_site0.query
    assert reader.factor == (1.0 if dtype == torch.float32 else 8**-0.5)
    assert relative_error(done.module(x), model(x)) <= 8 * torch.finfo(dtype).eps


class Autocast(nn.Module):
    """A model that has its own forward cast, weights and all."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = Mixed(), dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            return self.inner(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_that_autocast_rounds_are_rounded_alike_wherever_they_are_compared(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Autocast(dtype).eval(), torch.randn(2, 9, 16)
    done = ar.convert(model, (x,), variant="softmax")
    assert done.report["sites"][0]["identity_error"] <= 1e-5
    assert relative_error(done.module(x), model(x)) <= 8 * torch.finfo(dtype).eps


@every_type
def test_calibration_says_that_it_works_in_float32(dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match="calibration works in float32"):
        ar.convert(encoder().to(dtype), (INPUTS[0].to(dtype),), variant="l1", calibration=torch.randn(16, 3, 16, 16))
