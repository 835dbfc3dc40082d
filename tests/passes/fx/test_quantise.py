"""Linear layers on integers: what is rounded to what, that nothing else changes, and that equal work is done once."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

from attnrewrite.errors import InputError
from attnrewrite.passes.base import Edit
from attnrewrite.passes.fx.decompositions import Decompose
from attnrewrite.passes.fx.fold_constants import FoldConstants
from attnrewrite.passes.fx.merge_equal import MergeEqual
from attnrewrite.passes.fx.quantise import QUANTISED, integers
from attnrewrite.passes.fx.weights_as_linear import WeightsAsLinear

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Patches, three maps of one value, a product of activations, and a convolution whose windows overlap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.local = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 3, padding=1)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        x = self.local(self.patches(images)).flatten(2).transpose(1, 2)
        scores = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), -1)
        return scores @ self.value(x)


IMAGES = (torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(0)),)


def called(program: ExportedProgram) -> list[str]:
    return [str(node.target).split(".")[1] for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("kind", ["drawn", "zero", "tiny", "huge", "halves"])
def test_a_row_is_rounded_in_units_of_its_largest_number(kind: str) -> None:
    x = {"drawn": X, "zero": 0 * X, "tiny": 1e-35 * X, "huge": 1e37 * X, "halves": torch.tensor([[127.0, 0.5, 1.5]])}[
        kind
    ]
    found, size = integers(x, -1)
    largest = np.abs(x.numpy()).max(-1, keepdims=True)
    np.testing.assert_array_equal(size.numpy(), largest)
    assert (found.abs() <= 127).all()
    if kind == "halves":
        assert found.tolist() == [[127, 0, 2]]  # to even
    elif kind != "tiny":  # which is nearer to zero than to any integer
        exact = x.numpy().astype(np.float64) * 127 / np.where(largest, largest, 1)
        assert np.abs(found.numpy() - exact).max() <= 0.5 + 1e-4


def test_linear_layers_and_patches_are_on_integers_and_nothing_else() -> None:
    module = Block().eval()
    program = Decompose()(torch.export.export(module, IMAGES))
    result = QUANTISED.apply(program)
    gone = [edit.replaced for edit in result.edits]
    assert gone.count("aten.linear.default") == 3
    assert gone.count("aten.conv2d.default") == 1
    names = called(result.graph)
    assert (names.count("round"), names.count("conv2d"), names.count("linear")) == (2, 1, 0)  # one for three readers
    held = {**result.graph.state_dict, **result.graph.constants}
    matrices = [each for each in held.values() if each.dim() == 2 and len(each) > 1]
    assert len(matrices) == 4
    assert all(torch.equal(each, each.round()) and each.abs().max() == 127 for each in matrices)
    with torch.no_grad():
        expected, found = module(*IMAGES), result.graph.module()(*IMAGES)
    error = (found - expected).abs().max() / expected.abs().max()
    assert 1e-6 < error < 0.03
    assert not MergeEqual().apply(result.graph).modified


def test_a_linear_layer_is_the_product_of_its_integers() -> None:
    layer = nn.Linear(8, 6)
    found = QUANTISED(Decompose()(torch.export.export(layer, (X,)))).module()(X).detach().numpy()
    rows, sizes = (each.double().numpy() for each in integers(X, -1))
    columns, units = (each.detach().double().numpy() for each in integers(layer.weight, -1))
    expected = rows @ columns.T * sizes * units.T / 127**2 + layer.bias.detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


class Spelled(nn.Module):
    """Products with weights in other spellings than `linear`, and a `linear` whose weights are computed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        flat = (x @ self.one).flatten(0, 1)
        return F.linear(torch.addmm(self.bias, flat, self.two) + flat.mm(self.one), flat, x.flatten()[:10])


def test_products_with_weights_are_linear_layers_and_others_are_not() -> None:
    program = FoldConstants()(Decompose()(torch.export.export(Spelled(), (X,))))
    result = WeightsAsLinear().apply(program)
    names = {"aten.matmul.default", "aten.addmm.default", "aten.mm.default"}
    assert sorted(result.edits, key=str) == sorted(
        [*(Edit(name, "aten.linear.default") for name in names), Edit("aten.linear.default", "aten.matmul.default")],
        key=str,
    )
    torch.testing.assert_close(result.graph.module()(X), program.module()(X))
    assert called(QUANTISED(program)).count("round") == 2  # x, and flat for two readers
    assert not WeightsAsLinear().apply(FoldConstants()(result.graph)).modified


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + 1).relu() * (x + 1).relu() + (x + 2).relu() + torch.rand(5, 8) + torch.rand(5, 8)


def test_equal_operations_become_one() -> None:
    program = Decompose()(torch.export.export(Twice(), (X,)))
    result = MergeEqual().apply(program)
    assert [edit.replaced for edit in result.edits] == ["add_1", "relu_1"]
    assert Edit("relu_1", "relu") in result.edits
    assert called(result.graph).count("rand") == 2
    torch.manual_seed(0)
    expected = program.module()(X)
    torch.manual_seed(0)
    assert torch.equal(result.graph.module()(X), expected)
    assert not MergeEqual().apply(result.graph).modified


def test_values_that_are_written_over_are_not_merged() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu_(x + 1)

    with pytest.raises(InputError, match="merge-equal cannot be applied: the graph writes in place at relu_"):
        MergeEqual().apply(torch.export.export(Writes(), (X,)))
