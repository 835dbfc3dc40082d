"""Assignments to parts of a tensor become concatenations that give the same elements."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attnrewrite.passes.fx.functionalise import functional_graph

SHAPE = (2, 3, 5)
Place = tuple[slice | int, ...]


@st.composite
def _places(draw: st.DrawFn) -> Place:
    """Where an assignment goes in a tensor of SHAPE: a position or a range, in steps, of each of its last axes."""
    place: list[slice | int] = [slice(None)]
    for length in SHAPE[1:]:
        first = draw(st.integers(-length, length - 1))
        last = draw(st.sampled_from([None, *range(first % length + 1, length + 1)]))
        step = draw(st.integers(1, 3))
        place.append(draw(st.sampled_from([first, slice(first, last, step), slice(None)])))
    return tuple(place)


class _Added(nn.Module):
    """Numbers added to parts of what was computed, each as it broadcasts to its part."""

    def __init__(self, places: list[Place], axes: int) -> None:
        super().__init__()
        self.places, self.axes = places, axes

    def forward(self, x: Tensor) -> Tensor:
        made = x.sin()
        for place in self.places:
            part = x.cos()[place]
            made[place] += part if self.axes >= part.dim() else part[(0,) * (part.dim() - self.axes)]
        return made * 2


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


@settings(max_examples=6, deadline=None)  # a capture each
@given(st.lists(_places(), min_size=1, max_size=4))
def test_whatever_is_assigned_the_elements_are_the_same(places: list[Place]) -> None:
    model, x = _Assigned(places).eval(), torch.randn(SHAPE)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    graph = functional_graph(program)
    assert "aten.copy.default" not in {str(node.target) for node in graph.graph.nodes}
    other = torch.randn(5, *SHAPE[1:])
    assert torch.equal(graph(other), model(other))


@settings(max_examples=6, deadline=None)
@given(st.lists(_places(), min_size=1, max_size=3), st.integers(0, 3))
def test_what_is_added_to_a_part_is_a_sum(places: list[Place], axes: int) -> None:
    model, x = _Added(places, axes).eval(), torch.randn(SHAPE)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    graph = functional_graph(program)
    assert not [node for node in graph.graph.nodes if "scatter" in str(node.target)]
    other = torch.randn(5, *SHAPE[1:])
    assert torch.equal(graph(other), model(other))


class _AddedAsPictures(nn.Module):
    """Several numbers added to a part, while its rows and columns are laid apart; `more` reads one of the sums."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        made, rows = x.sin(), x.cos()[:, 0, 1:].view(-1, 1, 2, 2, 1)
        part = made[:, :, 1:].view(-1, 3, 2, 2, 1) + rows
        made[:, :, 1:] = (part + rows[0, :, :1] + rows[..., :1]).reshape(-1, 3, 4)
        return made + part.sum() if self.more else made


@pytest.mark.parametrize("more", [False, True])
def test_what_is_added_while_a_part_is_laid_out_otherwise_is_a_sum(more: bool) -> None:
    """Where the sums are nobody else's: what another reads is computed as it was."""
    model, x = _AddedAsPictures(more), torch.randn(SHAPE)
    graph = functional_graph(torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)))
    assert bool([node for node in graph.graph.nodes if "scatter" in str(node.target)]) is more
    other = torch.randn(5, *SHAPE[1:])
    torch.testing.assert_close(graph(other), model(other))


class _Interleaved(nn.Module):
    """Every third number from one source, in memory as what it is like, and what reads it as it lies there."""

    def forward(self, x: Tensor) -> Tensor:
        made = torch.zeros_like(x.transpose(1, 2))
        for start in (1, 0, 2):
            made[:, start::3] = x.transpose(1, 2)[:, start::3] * start
        return made.transpose(1, 2).reshape(len(x), -1)


def test_the_parts_of_a_step_are_a_stack() -> None:
    x = torch.randn(2, 5, 9)
    graph = functional_graph(torch.export.export(_Interleaved(), (x,)))
    targets = {str(node.target) for node in graph.graph.nodes}
    assert "aten.stack.default" in targets
    assert "aten.slice_scatter.default" not in targets
    assert torch.equal(graph(x), _Interleaved()(x))


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
