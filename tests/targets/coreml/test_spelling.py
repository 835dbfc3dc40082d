"""What coremltools is given: what it lacks is written out, what cannot be is refused by operator and node."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attnrewrite.errors import InputError
from attnrewrite.targets.coreml import package, spelling
from attnrewrite.targets.prepare import canonical, specialise

pytest.importorskip("coremltools", reason="coremltools is not installed")

X = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_an_operator_that_coremltools_lacks_is_written_out() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 2, batch_first=True).eval()
    program = specialise(layer, (X,))
    assert any("lstm" in str(node.target) for node in program.graph.nodes)
    made = spelling.readable(program)
    assert not any("lstm" in str(node.target) for node in made.graph.nodes)
    torch.testing.assert_close(made.module()(X)[0], layer(X)[0])


def test_no_value_is_called_like_a_text_of_an_operator() -> None:
    """coremltools takes the text of a division that is rounded down for a value called "floor"."""
    program = specialise(Called(lambda x: torch.div(x.floor(), 3, rounding_mode="floor")), (X,)).run_decompositions({})
    assert "floor" in {node.name for node in program.graph.nodes}
    made = spelling.readable(program)
    assert "floor" not in {node.name for node in made.graph.nodes}
    torch.testing.assert_close(made.module()(X), torch.div(X.floor(), 3, rounding_mode="floor"))


def test_what_draws_random_numbers_is_refused_by_its_node() -> None:
    program = specialise(Called(lambda x: x + torch.rand_like(x)), (X,))
    with pytest.raises(InputError, match=r"random numbers with aten.rand_like.default \(node 'rand_like'"):
        spelling.readable(program)


UNTOLD: dict[str, Callable[[Tensor], Tensor]] = {
    "histc": lambda x: x.histc(4),
    "cond": lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 2, (x,)),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_an_operator_that_none_can_write_out_is_named(name: str, tmp_path: Path) -> None:
    program = specialise(Called(UNTOLD[name]), (X,)).run_decompositions({})
    with pytest.raises(InputError, match=rf"coremltools has no operator .*{name}.* \(node '{name}'"):
        package.convert(program, tmp_path, "FLOAT32")
    assert not list(tmp_path.iterdir())


class Cubes(nn.Module):
    """Sums along axes in between, ten in all: no pass can merge them."""

    def forward(self, x: Tensor) -> Tensor:
        axes = x.reshape(1, 2, 2, 2, 2, 2, 2, 2, 1, 2)
        return axes.cumsum(2).permute(0, 3, 5, 1, 2, 6, 4, 7, 8, 9).sin().cumsum(4)


def test_more_axes_than_five_are_told_by_their_node(tmp_path: Path) -> None:
    program = canonical(specialise(Cubes(), (torch.randn(1, 256),)))
    why = r"^aten.* \(node '\w+'\) has more than the 5 axes that Core ML takes, .*: join axes in the model, or take"
    with pytest.raises(InputError, match=why):
        package.convert(program, tmp_path, "FLOAT16")
    assert list(tmp_path.iterdir()) == []
