"""Assignments to parts of a tensor become concatenations that give the same elements."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attnrewrite.passes.fx.functionalise import functional_graph

SHAPE = (2, 3, 5)
Place = tuple[slice | int, ...]


@st.composite
def _places(draw: st.DrawFn) -> Place:
    """Where an assignment goes in a tensor of SHAPE: a position or a range of each of its last axes."""
    place: list[slice | int] = [slice(None)]
    for length in SHAPE[1:]:
        first = draw(st.integers(-length, length - 1))
        last = draw(st.sampled_from([None, *range(first % length + 1, length + 1)]))
        place.append(draw(st.sampled_from([first, slice(first, last), slice(None)])))
    return tuple(place)


class _Assigned(nn.Module):
    """Numbers written into parts of zeros, one after another, of which half also read what stood there."""

    def __init__(self, places: list[Place]) -> None:
        super().__init__()
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        for count, place in enumerate(self.places):
            made[place] = (made[place] if count % 2 else 0.0) + (x * (count + 1))[place]
        return made.sin()


@settings(max_examples=15, deadline=None)  # a capture each
@given(st.lists(_places(), min_size=1, max_size=4))
def test_whatever_is_assigned_the_elements_are_the_same(places: list[Place]) -> None:
    model, x = _Assigned(places).eval(), torch.randn(SHAPE)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    graph = functional_graph(program)
    assert "aten.copy.default" not in {str(node.target) for node in graph.graph.nodes}
    other = torch.randn(5, *SHAPE[1:])
    assert torch.equal(graph(other), model(other))


class _Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made = torch.empty(*SHAPE[:2], 2 * SHAPE[2])
        made[..., : SHAPE[2]] = x.sin()
        made[..., SHAPE[2] :] = x.cos()
        return made


def test_what_is_assigned_to_every_part_is_one_concatenation() -> None:
    program = torch.export.export(_Halves(), (torch.randn(SHAPE),))
    targets = [str(node.target) for node in functional_graph(program).graph.nodes]
    assert targets == ["x", "aten.sin.default", "aten.cos.default", "aten.cat.default", "output"]


class _OfAnotherType(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made = torch.zeros(x.shape, dtype=torch.float64)
        made[:, 0] = x[:, 0]
        made[:, :, ::2] = 1.0
        return made


def test_numbers_of_another_type_are_written_as_the_tensors_own_and_steps_stay() -> None:
    x = torch.randn(SHAPE)
    graph = functional_graph(torch.export.export(_OfAnotherType(), (x,)))
    assert torch.equal(graph(x), _OfAnotherType()(x))
    assert "aten.slice_scatter.default" in {str(node.target) for node in graph.graph.nodes}
