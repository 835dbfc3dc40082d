"""What stands in a lowered model: the same numbers, from fewer parameters and fewer products."""

import copy
from functools import cache

import pytest
import torch
from spellings import SPELLINGS, build
from tiny_vits import INPUTS, encoder
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.flop_counter import FlopCounterMode

from attnrewrite.conversion.record import deployed
from attnrewrite.frontends.capture import capture
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.passes.verify import relative_error, rewritten_sites
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.plan import Placement, Plan
from attnrewrite.site import Scan
from attnrewrite.variants.base import Heads
from attnrewrite.variants.registry import get_variant

ROWS = {"exact_prefix": False}
FOLDED = [
    ("relu-linear", ROWS),
    ("relu-linear", {**ROWS, "local": True}),
    ("elu", ROWS),
    ("hedgehog", ROWS),
    ("polynomial", {**ROWS, "rank": 2}),
    ("mobile", ROWS),
    ("mobile", {**ROWS, "keep_heads": 0.5}),
    ("mobile", {**ROWS, "keep_heads": (0, 3), "reading": "paper"}),
    ("additive", ROWS),
    ("additive", {**ROWS, "queries": 1}),
    ("l1", ROWS),
    ("l1", {}),
    ("hedgehog", {}),
]
KEPT = [
    ("relu-linear", {}),
    ("mobile", {"keep_heads": 0.5}),
    ("additive", {**ROWS, "local": True}),
    ("mobile", {**ROWS, "keep_heads": 0.5, "local": True}),
    ("l1", {**ROWS, "centred": False}),
]


def label(case: tuple[str, dict]) -> str:
    return " ".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


@cache
def captured(dtype: torch.dtype) -> tuple[GraphModule, Scan]:
    module = capture("encoder", encoder().to(dtype), (INPUTS[0].to(dtype),)).module
    return module, scan(FxGraph(module), "encoder")


@cache
def rewritten(case: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The encoder with a form at both sites, its constants away from where they start."""
    name, options = next(c for c in (*FOLDED, *KEPT) if label(c) == case)
    module, found = captured(dtype)
    plan = Plan(found.model, tuple(Placement.at(site, get_variant(name, options)) for site in found))
    student = FxRewrite(plan)(module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for site in rewritten_sites(student).values():
            heads = Heads(*(torch.randn(4, 2, 17, 8, generator=generator).to(dtype) for _ in range(3)))
            site.form.refine(lambda heads=heads: iter([heads]))
            for parameter in site.form.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(dtype))
    return student


def cost(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[int, int]:
    """Elements of the exported program's parameters, and its multiplies and additions."""
    program = torch.export.export(module, inputs)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        program.module()(*inputs)
    return sum(parameter.numel() for parameter in program.parameters()), counter.get_total_flops()


@pytest.mark.parametrize("case", [label(case) for case in FOLDED])
@torch.no_grad()
def test_outer_maps_go_into_the_projections(case: str) -> None:
    student, exact = rewritten(case), rewritten(case, torch.float64)
    assert relative_error(deployed(exact)(INPUTS[0].double()), exact(INPUTS[0].double())) <= 1e-12
    wanted = copy.deepcopy(student).double()(INPUTS[0].double())
    rounding = relative_error(student(INPUTS[0]), wanted)
    assert relative_error(deployed(student)(INPUTS[0]), wanted) <= 1e-6 + rounding
    before, after = (cost(module, INPUTS) for module in (rewritten(case), deployed(rewritten(case))))
    assert after[0] < before[0]
    assert after[1] < before[1]


@pytest.mark.parametrize("case", [label(case) for case in KEPT])
@torch.no_grad()
def test_what_exact_rows_or_a_local_branch_need_stays(case: str) -> None:
    student, x = rewritten(case), INPUTS[0]
    ready = deployed(student)
    assert torch.equal(ready(x), student(x))
    assert sum(p.numel() for p in ready.parameters()) == sum(p.numel() for p in student.parameters())


@torch.no_grad()
def test_heads_that_take_no_part_are_not_projected() -> None:
    ready = rewritten_sites(deployed(rewritten("mobile exact_prefix=False keep_heads=0.5")))
    for site in ready.values():
        shapes = [tuple(part.weight.shape) for part in (site.query, site.key, site.value, site.output)]
        assert shapes == [(8, 16), (8, 16), (8, 16), (16, 8)]


@torch.no_grad()
def test_additive_has_nothing_left_but_the_tokens_parts() -> None:
    for site in rewritten_sites(deployed(rewritten("additive exact_prefix=False"))).values():
        assert tuple(site.output.weight.shape) == (16, 32)
        assert {name: tuple(own.shape) for name, own in site.form.named_parameters()} == {"weight": (16, 2)}


@torch.no_grad()
def test_projections_hold_what_they_can_where_others_do_not() -> None:
    """Rotations stand between the projection of the queries and the form: the output projection holds its maps."""
    model, x = build(next(each for each in SPELLINGS if each.name == "rotary"))
    graph = capture("rotary", model, (x,)).module
    (site,) = scan(FxGraph(graph), "rotary").sites
    student = FxRewrite(Plan("rotary", (Placement.at(site, get_variant("additive")),)))(graph).double()
    ready = deployed(student)
    assert relative_error(ready(x.double()), student(x.double())) <= 1e-12
    (found,) = rewritten_sites(ready).values()
    assert tuple(found.output.weight.shape) == (24, 48)
    assert {name.split(".")[0] for name, _ in found.form.named_parameters()} == {"weight", "slots"}


@torch.no_grad()
def test_deploying_twice_changes_nothing_more() -> None:
    for case in map(label, FOLDED):
        once = deployed(rewritten(case))
        assert torch.equal(deployed(once)(INPUTS[0]), once(INPUTS[0]))


@torch.no_grad()
def test_half_precision_keeps_its_maps_apart() -> None:
    """A product of two maps would be rounded to half precision once more."""
    ready = deployed(rewritten("relu-linear exact_prefix=False", torch.bfloat16))
    assert all(list(site.form.parameters()) for site in rewritten_sites(ready).values())
