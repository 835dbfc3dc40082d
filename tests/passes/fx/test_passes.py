"""Each pass over FX graphs alone: how much it edits, that the result computes the same, and what it refuses."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tiny_vits import Encoder
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.passes.base import Edit, PassResult
from attnrewrite.passes.fx.cleanup import CleanUp
from attnrewrite.passes.fx.composites import WriteOutComposites
from attnrewrite.passes.fx.decompositions import Decompose
from attnrewrite.passes.fx.deploy import DeploySites
from attnrewrite.passes.fx.fold_constants import FoldConstants
from attnrewrite.passes.fx.functionalise import Functionalise, RemoveAssertions, RemoveDropout, functional_graph
from attnrewrite.passes.fx.in_float32 import InFloat32
from attnrewrite.passes.fx.misread import WRITTEN_OUT
from attnrewrite.passes.fx.relu_for_gelu import ReluForGelu
from attnrewrite.passes.fx.rewrite import FxRewrite, scan_graph
from attnrewrite.passes.verify import relative_error
from attnrewrite.patterns.matcher import Scanned
from attnrewrite.plan import Placement, Plan
from attnrewrite.variants.registry import get_variant

X = torch.randn(2, 4, 6)


class Mixed(nn.Module):
    """An einsum, a dropout, an addition in place, a cast, a table that is looked up, a GELU, and an unused weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.unused = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(7))
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.first(x), 0.5, self.training)
        y += self.table[torch.tensor([0, 2, 1, 0])]
        y = F.gelu(torch.einsum("bnc,bmc->bnm", y, y.float()) @ x)
        return self.last(y)


@pytest.fixture
def program() -> ExportedProgram:
    torch.manual_seed(0)
    return torch.export.export(Mixed().eval(), (X,))


def names(program: ExportedProgram | GraphModule) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def same(program: ExportedProgram, other: ExportedProgram | GraphModule) -> bool:
    module = other.module() if isinstance(other, ExportedProgram) else other
    with torch.no_grad():
        return relative_error(module(X), program.module()(X)) < 1e-6


def test_functionalise_writes_nothing_in_place(program: ExportedProgram) -> None:
    result = Functionalise().apply(program)
    gone = [edit.replaced for edit in result.edits]
    assert gone.count("aten.add_.Tensor") == 1
    assert "aten.add_.Tensor" not in names(result.graph)
    assert same(program, result.graph)
    again = Functionalise().apply(result.graph)
    assert again == PassResult(result.graph)


@pytest.mark.parametrize(
    ("run", "gone"),
    [
        (lambda m, x: F.relu_(m(x)), [("relu_", "relu")]),
        (lambda m, x: m(x).masked_fill_(x > 0, 0.5).mul_(x[:1]), [("masked_fill_", "masked_fill"), ("mul_", "mul")]),
        (lambda m, x: (x * 2).copy_(x), [("copy_", "copy")]),
        (lambda m, x: [y := m(x), y.view(-1), y.add_(1)][1], None),  # what is seen of it changes
        (lambda m, x: [y := m(x), F.relu_(y)][0], [("relu_", "relu")]),
        (lambda m, x: [y := m(x), y[:, :2].zero_()][0], None),
        (lambda m, x: m(x).gt_(0), None),  # stays a float
    ],
)
def test_what_is_written_over_for_itself_alone_is_written_anew(
    run: Callable[[nn.Module, Tensor], Tensor], gone: list[tuple[str, str]] | None
) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return run(self.first, x)

    model = Writes()
    result = Functionalise().apply(torch.export.export(model, (X,), dynamic_shapes=({0: Dim.AUTO},)))
    traced = Edit("TRAINING", "ATEN") in result.edits
    told = [(edit.replaced.split(".")[1], (edit.by or "").split(".")[-2]) for edit in result.edits if not traced]
    assert (None if traced else told) == gone
    for x in (X, torch.randn(5, *X.shape[1:])):
        torch.testing.assert_close(result.graph.module()(x), model(x))


@pytest.mark.parametrize(
    ("run", "stands"),
    [
        (lambda x: torch.einsum("bnc,bmc->bnm", x, x), "matmul permute reshape"),
        (lambda x: torch.einsum("bnc->bcn", x), "einsum"),  # nothing is paired
        (lambda x: torch.tensordot(x, x, ([2, 1], [2, 1])), "matmul permute reshape"),
        (lambda x: torch.inner(x, x[0]), "matmul permute reshape select"),
        (lambda x: torch.linalg.matmul(x, x.mT), "matmul transpose"),
        (lambda x: torch.linalg.multi_dot([x[0], x[0].H, x[0]]), "matmul select transpose"),
        (lambda x: torch.baddbmm(x[:1, :, :4], x, x.adjoint(), beta=0.5), "add bmm mul slice transpose"),
        (lambda x: torch.baddbmm(x[:1, :, :4], x, x.adjoint(), beta=0, alpha=3), "bmm mul transpose"),
        (lambda x: torch.special.softmax(x, 1).ravel(), "reshape softmax"),
        (lambda x: x[:1].expand_as(x).swapdims(1, 2).moveaxis(0, 1), "expand movedim slice transpose"),
        (lambda x: x.flatten(1).view_as(x).multiply(2).greater(x).clip(0, 1), "clamp flatten gt mul view"),
    ],
)
def test_composites_are_written_out_where_they_stand(run: Callable[[Tensor], Tensor], stands: str) -> None:
    class Composite(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return run(x)

    module = functional_graph(torch.export.export(Composite(), (X,), dynamic_shapes=({0: Dim.AUTO},)))
    found = {name.split(".")[1] for name in names(module) if name.startswith("aten.")}
    assert found - {"sym_size"} == set(stands.split())
    assert not WriteOutComposites().apply(module).modified
    for x in (X, torch.randn(5, *X.shape[1:])):
        torch.testing.assert_close(module(x), run(x))


def test_decompose_writes_out_what_its_table_holds() -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(F.scaled_dot_product_attention(x, x, x, scale=0.3).roll(1, 1))

    program = torch.export.export(Attend(), (X,))
    result = Decompose(WRITTEN_OUT).apply(program)
    gone = ["aten.scaled_dot_product_attention.default", "aten.roll.default"]  # an exact gelu is left as it is
    assert sorted(result.edits, key=str) == sorted([*map(Edit, gone), Edit("TRAINING", "ATEN")], key=str)
    assert "aten.gelu.default" in names(result.graph)
    assert same(program, result.graph)
    assert not Decompose(WRITTEN_OUT).apply(result.graph).modified


def test_what_writes_in_place_is_not_what_decomposition_ensures(program: ExportedProgram) -> None:
    refusal = Decompose().ensures(program, PassResult(program))
    assert refusal is not None
    assert (refusal.code, refusal.sentence) == ("in-place", "writes in place at detach_ (aten.detach_.default)")


def test_another_signature_is_not_what_decomposition_ensures(program: ExportedProgram) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, x

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return x + self.calls

    others = {"other-inputs": (Two(), (X, X)), "other-outputs": (Pair(), (X,)), "other-effects": (Counting(), (X,))}
    for code, (module, inputs) in others.items():
        after = torch.export.export(module, inputs).run_decompositions({})
        refusal = Decompose().ensures(program, PassResult(after))
        assert refusal is not None
        assert refusal.code == code


def test_fold_constants_computes_what_follows_from_weights_alone(program: ExportedProgram) -> None:
    functional = Decompose()(program)
    result = FoldConstants().apply(functional)
    assert [edit for edit in result.edits if edit.by is not None] == [Edit("index", "folded_0")]
    assert {"table", "unused"} <= {edit.replaced for edit in result.edits if edit.by is None}
    assert not {"table", "unused"} & {*result.graph.state_dict, *result.graph.constants}
    assert same(program, result.graph)
    assert not FoldConstants().apply(Decompose()(result.graph)).modified


def test_folding_again_leaves_the_first_constants_as_they_are() -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + torch.arange(6) * 2.0)

    once = FoldConstants()(Decompose()(torch.export.export(Sum(), (X,))))
    more = Decompose({torch.ops.aten.relu.default: lambda x: x + torch.arange(6) * 3.0})(once)
    assert same(more, FoldConstants()(more))


def test_what_is_asserted_of_a_constant_goes_with_it() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Parameter(torch.randn(4, 6).double())

        def forward(self, x: Tensor) -> Tensor:
            return x + self.places.exp().to(x.dtype)

    module = Placed()
    exported = torch.export.export(module, (X,))
    assert any("assert" in str(node.target) for node in exported.graph.nodes)
    folded = FoldConstants()(exported)
    assert [node.name for node in folded.graph.nodes if node.op == "call_function"] == ["add"]
    assert torch.equal(folded.module()(X), module(X))


def test_constants_that_are_written_over_are_not_folded(program: ExportedProgram) -> None:
    with pytest.raises(InputError, match=r"fold-constants cannot be applied: the graph writes in place at detach_ "):
        FoldConstants()(program)


def test_buffers_that_a_call_changes_are_not_folded() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("step", torch.ones(()), persistent=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.calls.add_(self.step * 2)
            return x + self.calls * 3, self.step * 5

    folded = FoldConstants()(Functionalise()(torch.export.export(Counting(), (X,))))
    assert sorted(folded.state_dict) == ["calls", "folded_0", "folded_1"]
    module, original = folded.module(), Counting()
    for _ in range(2):
        torch.testing.assert_close(module(X), original(X))


def test_dropout_goes_in_evaluation_mode(program: ExportedProgram) -> None:
    module = program.module(check_guards=False)
    result = RemoveDropout().apply(module)
    assert result == PassResult(module, (Edit("dropout", "linear"),))
    assert "aten.dropout.default" not in names(module)
    assert same(program, module)
    assert not RemoveDropout().apply(module).modified


def test_dropout_of_a_model_in_training_stays() -> None:
    module = torch.export.export(nn.Dropout(0.5).train(), (X,)).module(check_guards=False)
    assert not RemoveDropout().apply(module).modified
    assert names(module) == ["aten.dropout.default"]


def test_assertions_and_what_only_they_read_go(program: ExportedProgram) -> None:
    module = program.module(check_guards=False)
    result = RemoveAssertions().apply(module)
    assert result.edits == (Edit("unused"), Edit("_assert_tensor_metadata_default"))  # the weight itself stays
    assert hasattr(module, "unused")
    assert not any("_assert" in name for name in names(module))
    assert same(program, module)
    assert not RemoveAssertions().apply(module).modified


def test_an_attention_that_nothing_reads_goes() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    read, _ = (graph.call_function(torch.ops.aten.scaled_dot_product_attention.default, (x, x, x)) for _ in range(2))
    graph.output(read)
    module = RemoveAssertions()(torch.fx.GraphModule(nn.Module(), graph))
    assert names(module) == ["aten.scaled_dot_product_attention.default"]
    assert torch.equal(module(X), F.scaled_dot_product_attention(X, X, X))


def test_clean_up_drops_operations_weights_and_modules_that_nothing_reads(program: ExportedProgram) -> None:
    module = functional_graph(program)
    assert CleanUp().apply(module).edits == (Edit("unused"),)
    (last,) = (node for node in module.graph.nodes if node.op == "output")
    gelu = next(node for node in module.graph.nodes if "gelu" in str(node.target))
    last.replace_input_with(last.args[0][0], gelu)
    gone = [edit.replaced for edit in CleanUp().apply(module).edits]
    assert gone[-2:] == ["last.weight", "last.bias"]
    assert len(gone) == 5  # the linear map, and the two nodes that read its weights
    assert not hasattr(module, "last")
    assert not CleanUp().apply(module).modified


def test_tied_weights_go_by_the_names_that_nothing_reads() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
            self.other.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.other(x)

    model = Tied()
    module = torch.export.export(model, (X,)).module(check_guards=False)
    CleanUp().apply(module)
    assert len(dict(module.named_parameters())) == 2
    torch.testing.assert_close(module(X), model(X))


@pytest.fixture(scope="module")
def scanned() -> Scanned:
    torch.manual_seed(0)
    model = Encoder()
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True, activation="gelu")
    model.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    program = torch.export.export(model.eval(), (torch.randn(2, 3, 16, 16),))
    return scan_graph(functional_graph(program), "encoder")


def placed(scanned: Scanned, variant: str, **options: object) -> Plan:
    return Plan("encoder", tuple(Placement.at(site, get_variant(variant, options)) for site in scanned.scan.sites))


def test_the_rewrite_takes_the_scan_that_was_made(scanned: Scanned, monkeypatch: pytest.MonkeyPatch) -> None:
    module, plan = scanned.graph.module, placed(scanned, "l1")
    scans: list[str] = []
    monkeypatch.setattr("attnrewrite.passes.fx.rewrite.scan_graph", lambda *_: scans.append("scan") or scanned)
    with_it = FxRewrite(plan, scanned).apply(module)
    assert scans == []
    without = FxRewrite(plan).apply(module)
    assert scans == ["scan"]
    assert with_it.edits == without.edits
    assert [(edit.replaced, edit.by, edit.site) for edit in with_it.edits] == [
        ("linear_1", "attention_site0", "site0"),
        ("linear_5", "attention_site1", "site1"),
    ]
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(with_it.graph(images), without.graph(images))


def test_a_scan_of_another_graph_is_refused(scanned: Scanned) -> None:
    other = functional_graph(torch.export.export(Encoder().eval(), (torch.randn(2, 3, 16, 16),)))
    with pytest.raises(InputError, match="the graph is not the one that was scanned"):
        FxRewrite(placed(scanned, "l1"), scanned)(other)


def test_a_graph_that_was_not_exported_is_refused(scanned: Scanned) -> None:
    with pytest.raises(InputError, match=r"the graph does not tell the shape of input_1: make it with torch.export"):
        FxRewrite(placed(scanned, "l1"))(torch.fx.symbolic_trace(nn.ReLU()))


def test_a_site_without_its_call_is_not_what_the_rewrite_ensures(scanned: Scanned) -> None:
    rewriting = FxRewrite(placed(scanned, "l1"), scanned)
    refusal = rewriting.ensures(scanned.graph.module, PassResult(scanned.graph.module))
    assert refusal is not None
    assert (refusal.code, refusal.sentence) == ("site-not-called", "does not call the module of site0 once")


def test_what_a_variant_asks_for_around_its_site_is_among_the_edits(scanned: Scanned) -> None:
    edits = FxRewrite(placed(scanned, "l1", relu=True), scanned).apply(scanned.graph.module).edits
    assert [edit.replaced for edit in edits] == ["linear_1", "linear_5", "gelu", "gelu_1"]


def test_refitted_parameters_are_edits(scanned: Scanned) -> None:
    bias = torch.ones(5)
    result = FxRewrite(Plan("encoder", (), {"head.bias": bias}), scanned).apply(scanned.graph.module)
    assert result.edits == (Edit("head.bias", "head.bias"),)
    assert torch.equal(result.graph.get_parameter("head.bias"), bias)
    assert not FxRewrite(Plan("encoder", ()), scanned).apply(scanned.graph.module).modified


def test_relu_for_gelu_behind_a_node(scanned: Scanned) -> None:
    module = FxRewrite(Plan("encoder", ()), scanned)(scanned.graph.module)
    result = ReluForGelu("linear_1").apply(module)
    assert result.edits == (Edit("gelu", "gelu"),)
    assert [name for name in names(module) if "lu" in name] == ["aten.relu.default", "aten.gelu.default"]
    assert not ReluForGelu("linear_1").apply(module).modified
    with pytest.raises(InputError, match="relu-for-gelu cannot be applied: the graph has no node 'nowhere'"):
        ReluForGelu("nowhere")(module)


def test_deployed_sites_compute_the_same(scanned: Scanned) -> None:
    module = FxRewrite(placed(scanned, "polynomial"), scanned)(scanned.graph.module)
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        wanted = module(images)
        assert DeploySites().apply(module).edits == (Edit("site0", "site0"), Edit("site1", "site1"))
        assert relative_error(module(images), wanted) < 1e-6


def test_a_failed_check_is_another_error_than_bad_input(program: ExportedProgram) -> None:
    class Halved(Decompose):
        def rewrite(self, graph: ExportedProgram) -> PassResult[ExportedProgram]:
            return PassResult(graph)

    with pytest.raises(CheckFailedError, match=r"^halved failed: the result writes in place at detach_ "):
        Halved()(program)


class Counting(nn.Module):
    """Counts its calls in a buffer, which is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls


def test_a_buffer_written_in_place_is_written_by_the_functional_program() -> None:
    program = torch.export.export(Counting(), (X,))
    functional = Functionalise()(program)
    assert list(functional.graph_signature.buffers_to_mutate.values()) == ["calls"]
    module = functional.module()
    assert [float(module(torch.ones(2, 4, 6)).max()) for _ in range(3)] == [1.0, 2.0, 3.0]


class Half(nn.Module):
    """A linear map in float16, whose result is cast to bfloat16 and back."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x).to(torch.bfloat16).to(torch.float16)


def test_half_precision_is_computed_in_float32_by_a_copy() -> None:
    module = RemoveAssertions()(torch.export.export(Half(), (X.half(),)).module())
    result = InFloat32().apply(module)
    assert sorted(edit.replaced for edit in result.edits) == ["map.bias", "map.weight", "to", "to_1"]
    wide = {**dict(result.graph.named_parameters()), **dict(result.graph.named_buffers())}
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    assert module.map.weight.dtype == torch.float16
    found, wanted = result.graph(X.half().float()), F.linear(X.half().float(), wide["map.weight"], wide["map.bias"])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not InFloat32().apply(result.graph).modified
