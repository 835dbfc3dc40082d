"""The inputs that a check draws: by type and range, unlike each other, in other batches than the example's."""

import pytest
import torch
from torch import Tensor, nn

from attnrewrite.frontends.capture import capture
from attnrewrite.passes.draws import arithmetic_inputs, drawn, drawn_alike, in_one_batch


class Sum(nn.Module):
    """Any three inputs of a batch, added up."""

    def forward(self, x: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
        return x.flatten(1).sum(1) + mask.flatten(1).sum(1) + numbers.flatten(1).sum(1)


EXAMPLE = (torch.randn(1, 6, 4) * 5 + 3, torch.ones(1, 6, 6, dtype=torch.bool), torch.arange(12).view(1, 12) % 7)


def test_each_draw_has_the_types_and_ranges_of_the_example_and_a_batch_of_its_own() -> None:
    graph = capture("sum", Sum(), EXAMPLE).module
    example, mixed = drawn(graph, EXAMPLE)
    assert example.inputs == EXAMPLE
    others = (mixed, *mixed.fallbacks())
    assert [draw.inputs[0].shape[0] for draw in others] == [2, 2, 1, 1]
    for draw in others:
        values, mask, numbers = draw.inputs
        assert [t.dtype for t in draw.inputs] == [t.dtype for t in EXAMPLE]
        assert [t.shape[1:] for t in draw.inputs] == [t.shape[1:] for t in EXAMPLE]
        assert values.unique().numel() > 4
        assert 0 <= int(numbers.min()) < int(numbers.max()) <= 6
        assert bool(mask[..., 0].all())  # a query that sees no key has no answer
        assert not bool(mask.all())
        assert len({tuple(row.tolist()) for row in mask.flatten(0, 1)}) > 1  # by image and by query
    again = drawn(graph, EXAMPLE)[1]
    for one, two in zip(others, (again, *again.fallbacks()), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.inputs, two.inputs, strict=True))


def test_what_an_example_cannot_show_is_drawn_all_the_same() -> None:
    """A blank picture becomes noise; ones of any type, which could be a mask, become zeros and ones, in a part of the
    draw where they are numbers.
    """
    blank = (torch.zeros(1, 3, 8, 8), torch.ones(1, 8), torch.ones(1, 8, dtype=torch.int64))
    mixed = drawn(capture("sum", Sum(), blank).module, blank)[1]
    for draw in (mixed, *mixed.fallbacks()):
        assert float(draw.inputs[0].std()) > 0.1
        assert set(draw.inputs[2].unique().tolist()) == {0, 1}
    as_mask, *as_numbers = (draw.inputs[1] for draw in mixed.fallbacks())
    assert set(as_mask.unique().tolist()) == {0.0, 1.0}
    assert all(not set(numbers.unique().tolist()) <= {0.0, 1.0} for numbers in as_numbers)
    assert set(mixed.inputs[1][:, :3].unique().tolist()) <= {0.0, 1.0} < set(mixed.inputs[1].unique().tolist())


def test_numbers_that_belong_together_keep_to_their_order() -> None:
    """Boxes: left, top, right, bottom; a model may look up how wide they are."""
    corners = torch.arange(18).reshape(1, 9, 2)
    boxes = torch.cat([corners, corners + torch.tensor([3, 5])], 2)
    _, two = drawn_alike((boxes,))
    (found,) = two.inputs
    assert not torch.equal(found, boxes)
    assert (found[..., 2:] - found[..., :2]).unique(dim=1).tolist() == [[[3, 5]]]


def test_a_draw_has_a_part_of_each_kind_where_it_has_room() -> None:
    """Along the longest axis of an image: other values, of both signs, in the example's own order of size; and where
    that is short, one kind alone.
    """
    example = (torch.rand(1, 3, 4, 90) + 5, torch.randn(1, 2))
    graph = capture("product", Product(), example).module
    pictures, short = drawn(graph, example)[1].inputs
    own, sparse, large = (part.flatten() for part in pictures.tensor_split(3, 3))
    assert set(own.tolist()) <= set(example[0].flatten().tolist())
    assert float((sparse == 0).double().mean()) > 0.4
    assert float(sparse.min()) < 0 < float(sparse.max()) < 1
    assert float(large.min()) > 5
    assert set(short.flatten().tolist()) <= set(example[1].flatten().tolist())


class Product(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.flatten(1).sum(1) * y.sum(1)


def test_a_graph_with_one_batch_size_gets_no_other() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.arange(2.0).view(2, 1)

    example = (torch.randn(2, 5),)
    draws = drawn(capture("two", Two(), example).module, example)
    assert {draw.inputs[0].shape for draw in (*draws, *draws[1].fallbacks())} == {torch.Size([2, 5])}


def test_the_example_goes_in_with_what_is_drawn_where_every_input_is_each_images_own() -> None:
    graph = capture("sum", Sum(), EXAMPLE).module
    draws = drawn(graph, EXAMPLE)
    (both,) = in_one_batch(draws)
    assert tuple(both.fallbacks()) == draws
    assert both.name == "the example and values in another order, sparse, and large, 2 images"
    for joined, alone, two, one in zip(both.inputs, EXAMPLE, draws[1].inputs, arithmetic_inputs([both]), strict=True):
        assert torch.equal(joined, torch.cat([alone, two[1:]]))
        assert torch.equal(one, two[1:])
    assert arithmetic_inputs(draws) is draws[1].inputs

    shared = (EXAMPLE[0], torch.ones(6, 6, dtype=torch.bool), EXAMPLE[2])  # a mask that images have in common
    apart = drawn(capture("sum", SharedMask(), shared).module, shared)
    assert [draw.name for draw in in_one_batch(apart)] == [draw.name for draw in apart]


class SharedMask(Sum):
    def forward(self, x: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
        return super().forward(x, mask[None], numbers)


class Indexed(nn.Module):
    """Words [B, 6] and which of them count [B, 6], which meet by an index alone."""

    def forward(self, words: Tensor, kept: Tensor) -> Tensor:
        return words * kept[torch.arange(words.shape[0])[:, None], torch.arange(6)]


@pytest.mark.parametrize("images", [1, 2])
def test_inputs_that_meet_by_an_index_alone_are_drawn_for_as_many_images(images: int) -> None:
    example = (torch.randn(images, 6), torch.ones(images, 6, dtype=torch.bool))
    graph = capture("indexed", Indexed(), example).module
    for draw in drawn(graph, example)[1:]:
        assert [len(tensor) for tensor in draw.inputs] == [2, 2]
        torch.testing.assert_close(graph(*draw.inputs), draw.inputs[0] * draw.inputs[1], rtol=0, atol=0)
