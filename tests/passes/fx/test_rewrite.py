"""The FX pass: what it edits, what it leaves, and that the result is a model like any other."""

import pytest
import torch
from tiny_vits import Encoder
from torch import Tensor, nn
from torch.fx import GraphModule

from attnrewrite.errors import InputError
from attnrewrite.frontends.capture import Captured, capture, export
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.passes.verify import float64_errors, relative_error, rewritten_sites
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.plan import Placement, Plan
from attnrewrite.site import Scan
from attnrewrite.variants.registry import get_variant


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return capture("encoder", Encoder().eval(), (torch.randn(2, 3, 16, 16),))


@pytest.fixture(scope="module")
def found(captured: Captured) -> Scan:
    return scan(FxGraph(captured.module), "encoder")


def plan(found: Scan, variant: str, sites: slice = slice(None)) -> Plan:
    return Plan(found.model, tuple(Placement.at(site, get_variant(variant)) for site in found.sites[sites]))


def test_the_grid_and_its_class_token_are_known(found: Scan) -> None:
    grids = [site.grid and (site.grid.rows, site.grid.columns, site.grid.prefix) for site in found.sites]
    assert grids == [(4, 4, 1), (4, 4, 1)]


def test_only_the_placed_sites_change_and_the_original_stays(captured: Captured, found: Scan) -> None:
    x = torch.randn(3, 3, 16, 16)
    before = captured.module(x)
    state = {name: tensor.clone() for name, tensor in captured.module.state_dict().items()}
    rewritten, edits = FxRewrite(plan(found, "l1", slice(1, 2))).apply(captured.module)
    assert [(edit.site, edit.module) for edit in edits] == [("site1", "attention_site1")]
    assert sum("scaled_dot_product" in str(node.target) for node in rewritten.graph.nodes) == 1
    with torch.no_grad():
        for parameter in rewritten.parameters():
            parameter.mul_(2)
    assert torch.equal(captured.module(x), before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in captured.module.state_dict().items())


def test_dead_parameters_go_and_nothing_is_lost(captured: Captured, found: Scan) -> None:
    identity = FxRewrite(plan(found, "softmax"))(captured.module)
    names = dict(identity.named_parameters())
    assert not [name for name in names if "in_proj" in name or "out_proj" in name]
    count = sum(parameter.numel() for parameter in captured.module.parameters())
    assert sum(parameter.numel() for parameter in names.values()) == count


def test_the_result_trains_saves_and_exports_again(captured: Captured, found: Scan) -> None:
    rewritten = FxRewrite(plan(found, "l1"))(captured.module)
    assert isinstance(rewritten, GraphModule)
    x = torch.randn(4, 3, 16, 16)
    rewritten(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in rewritten.parameters())
    program, note = export(rewritten, (x[:1],))
    assert note is None
    with torch.no_grad():
        assert relative_error(program.module()(x), rewritten(x)) < 1e-6


def test_a_rewritten_graph_has_nothing_left_to_find(captured: Captured, found: Scan) -> None:
    program, _ = export(FxRewrite(plan(found, "l1"))(captured.module), captured.example_inputs)
    again = scan(FxGraph(capture("again", program, captured.example_inputs).module), "again")
    # the class token's exact softmax row is still an attention, over one query
    assert [site.n_queries for site in again.sites] == [1, 1]


def test_the_rewritten_arithmetic_is_checked_in_float64(captured: Captured, found: Scan) -> None:
    rewritten = FxRewrite(plan(found, "l1"))(captured.module)
    errors = float64_errors(rewritten, captured.example_inputs)
    assert set(errors) == set(rewritten_sites(rewritten)) == {"site0", "site1"}
    assert max(errors.values()) < 1e-5


class Gated(nn.Module):
    """Attention whose output is gated and then viewed, so that no output projection is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).view(x.shape[0], -1, 16)
        return self.head(out * self.gate(x))


def test_what_follows_a_site_takes_its_output_however_it_lies_in_memory() -> None:
    module = capture("gated", Gated().eval(), (torch.randn(2, 12, 16),)).module
    found = scan(FxGraph(module), "gated")
    x = torch.randn(3, 12, 16)
    with torch.no_grad():
        assert relative_error(FxRewrite(plan(found, "softmax"))(module)(x), module(x)) < 1e-6
        assert FxRewrite(plan(found, "l1"))(module)(x).shape == (3, 12, 5)


def test_a_variant_that_refuses_a_site_is_an_error_that_names_it(captured: Captured, found: Scan) -> None:
    with pytest.raises(InputError, match=r"refusing cannot stand at site0 .*: it has the wrong colour"):
        FxRewrite(Plan("encoder", (Placement.at(found.sites[0], _Refusing()),)))(captured.module)  # type: ignore[arg-type]


@pytest.mark.parametrize("norm_first", [True, False])
def test_relu_takes_the_place_of_gelu_behind_the_rewritten_site_alone(norm_first: bool) -> None:
    model = Encoder()
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first, activation="gelu")
    model.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    module = capture("encoder", model.eval(), (torch.randn(2, 3, 16, 16),)).module
    first = scan(FxGraph(module), "encoder").sites[0]
    sima = get_variant("l1", {"relu": True})
    rewritten = FxRewrite(Plan("encoder", (Placement.at(first, sima),)))(module)
    activations = [str(node.target) for node in rewritten.graph.nodes if "lu" in str(node.target)]
    assert activations == ["aten.relu.default", "aten.gelu.default"]


def test_relu_where_there_is_no_gelu_is_told(captured: Captured, found: Scan, caplog: pytest.LogCaptureFixture) -> None:
    sima = get_variant("l1", {"relu": True})
    FxRewrite(Plan("encoder", (Placement.at(found.sites[1], sima),)))(captured.module)
    (told,) = caplog.messages
    assert told == "site1: relu=true finds no GELU behind the attention: no activation is changed there"


class _Refusing:
    name = "refusing"

    def refuse(self, site: object) -> str:
        return "has the wrong colour"
