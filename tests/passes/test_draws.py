"""The inputs that a check draws: by type and range, unlike each other, in other batches than the example's."""

import torch
from torch import Tensor, nn

from attnrewrite.frontends.capture import capture
from attnrewrite.passes.draws import drawn, telling, together


class Sum(nn.Module):
    """Any three inputs of a batch, added up."""

    def forward(self, x: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
        return x.flatten(1).sum(1) + mask.flatten(1).sum(1) + numbers.flatten(1).sum(1)


EXAMPLE = (torch.randn(1, 6, 4) * 5 + 3, torch.ones(1, 6, 6, dtype=torch.bool), torch.arange(12).view(1, 12) % 7)


def test_each_draw_has_the_types_and_ranges_of_the_example_and_a_batch_of_its_own() -> None:
    graph = capture("sum", Sum(), EXAMPLE).module
    example, *others = drawn(graph, EXAMPLE)
    assert example.inputs == EXAMPLE
    assert [draw.inputs[0].shape[0] for draw in others] == [2, 1, 1]
    for draw in others:
        values, mask, numbers = draw.inputs
        assert [t.dtype for t in draw.inputs] == [t.dtype for t in EXAMPLE]
        assert [t.shape[1:] for t in draw.inputs] == [t.shape[1:] for t in EXAMPLE]
        assert values.unique().numel() > 4
        assert 0 <= int(numbers.min()) < int(numbers.max()) <= 6
        assert bool(mask[..., 0].all())  # a query that sees no key has no answer
        assert not bool(mask.all())
        assert len({tuple(row.tolist()) for row in mask.flatten(0, 1)}) > 1  # by image and by query
    for one, two in zip(others, drawn(graph, EXAMPLE)[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.inputs, two.inputs, strict=True))


def test_what_an_example_cannot_show_is_drawn_all_the_same() -> None:
    """A blank picture becomes noise; ones of any type, which could be a mask, become zeros and ones."""
    blank = (torch.zeros(1, 3, 8, 8), torch.ones(1, 8), torch.ones(1, 8, dtype=torch.int64))
    for draw in drawn(capture("sum", Sum(), blank).module, blank)[1:]:
        assert float(draw.inputs[0].std()) > 0.1
        assert set(draw.inputs[2].unique().tolist()) == {0, 1}
    assert set(drawn(capture("sum", Sum(), blank).module, blank)[1].inputs[1].unique().tolist()) == {0.0, 1.0}


def test_a_graph_with_one_batch_size_gets_no_other() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.arange(2.0).view(2, 1)

    example = (torch.randn(2, 5),)
    draws = drawn(capture("two", Two(), example).module, example)
    assert len(draws) == 4
    assert {draw.inputs[0].shape for draw in draws} == {torch.Size([2, 5])}


def test_the_example_goes_in_with_its_values_in_another_order_where_every_input_is_each_images_own() -> None:
    graph = capture("sum", Sum(), EXAMPLE).module
    draws = drawn(graph, EXAMPLE)
    both, *others = together(draws)
    assert [*both.joins, *others] == [*draws]
    assert both.name == "the example and the example's values in another order, 2 images"
    for joined, alone, two in zip(both.inputs, EXAMPLE, draws[1].inputs, strict=True):
        assert torch.equal(joined, torch.cat([alone, two[1:]]))
    assert telling((both, *others)) is both.inputs
    assert telling(draws) is draws[1].inputs

    shared = (EXAMPLE[0], torch.ones(6, 6, dtype=torch.bool), EXAMPLE[2])  # a mask that images have in common
    apart = drawn(capture("sum", SharedMask(), shared).module, shared)
    assert [draw.name for draw in together(apart)] == [draw.name for draw in apart]


class SharedMask(Sum):
    def forward(self, x: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
        return super().forward(x, mask[None], numbers)
