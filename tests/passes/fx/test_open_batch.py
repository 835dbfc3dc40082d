"""A batch that is held as a number becomes open, in whatever spelling; where it cannot, the pass says where and why."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.errors import InputError, Refusal
from attnrewrite.passes.base import PassResult
from attnrewrite.passes.draws import drawn_alike
from attnrewrite.passes.fx.batch_mapped import map_images
from attnrewrite.passes.fx.functionalise import functional_graph
from attnrewrite.passes.fx.open_batch import OpenBatch
from attnrewrite.passes.in_batches import InBatches, Known, images_mixed, with_images
from attnrewrite.passes.verify import rewritten_sites
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan

TOKENS, WIDTH, HEADS = 5, 8, 2
Heads = Callable[[Tensor, int], tuple[Tensor, ...]]


class Model(nn.Module):
    """[B, 4, 8] -> [B, 3]: a class token, attention, a head; `heads` and `joined` say how sizes are written."""

    def __init__(self, batch: Callable[[Tensor], int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch = batch
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.qkv, self.proj, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x, self.batch(x))
        return self.answer(x + self.attend(x, self.batch(x)))

    def tokens(self, x: Tensor, b: int) -> Tensor:
        return torch.cat([self.token.expand(b, -1, -1), x], 1)

    def attend(self, x: Tensor, b: int) -> Tensor:
        q, k, v = self.qkv(x).view(b, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(b, TOKENS, WIDTH))

    def answer(self, x: Tensor) -> Tensor:
        return self.head(x[:, 0])


class Folded(Model):
    """Heads are folded into the batch, for one batched product."""

    def attend(self, x: Tensor, b: int) -> Tensor:
        q, k, v = self.qkv(x).view(b, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        q, k, v = (part.reshape(b * HEADS, TOKENS, WIDTH // HEADS) for part in (q, k, v))
        out = torch.bmm((torch.bmm(q, k.mT) / 2).softmax(-1), v).view(b, HEADS, TOKENS, WIDTH // HEADS)
        return self.proj(out.transpose(1, 2).reshape(b, TOKENS, WIDTH))


class TokensFirst(Model):
    """[tokens, batch, channels], as nn.MultiheadAttention has it; tokens and batch as one axis for the maps."""

    def attend(self, x: Tensor, b: int) -> Tensor:
        flat = self.qkv(x.transpose(0, 1).reshape(TOKENS * b, WIDTH)).view(TOKENS, b, 3 * WIDTH)
        q, k, v = (part.reshape(TOKENS, b * HEADS, WIDTH // HEADS).transpose(0, 1) for part in flat.chunk(3, -1))
        out = torch.bmm((torch.bmm(q, k.mT) / 2).softmax(-1), v).transpose(0, 1).reshape(TOKENS * b, WIDTH)
        return self.proj(out).view(TOKENS, b, WIDTH).transpose(0, 1)


class Made(Model):
    """Tensors made for the batch: zeros, a mask that is the same for all images, positions repeated."""

    def attend(self, x: Tensor, b: int) -> Tensor:
        mask = torch.zeros(b, 1, TOKENS, TOKENS).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -1e4)
        positions = torch.arange(TOKENS).repeat(b, 1).unsqueeze(-1) / TOKENS
        q, k, v = self.qkv(x + positions).view(b, TOKENS, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        out = ((q @ k.mT) / 2 + mask).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(b, TOKENS, WIDTH))


class Windowed(Model):
    """Four of five tokens in two windows, which lie behind the images."""

    def attend(self, x: Tensor, b: int) -> Tensor:
        windows = x[0:b, 1:].reshape(b * 2, 2, WIDTH)
        q, k, v = self.qkv(windows).view(b * 2, 2, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.tensor([[0.0, 1.0], [0.5, 0.0]]).repeat(b, 1).view(b * 2, 1, 1, 2)
        out = ((q @ k.mT) / 2 + mask).softmax(-1) @ v
        return F.pad(self.proj(out.transpose(1, 2).reshape(b, 4, WIDTH)), (0, 0, 1, 0))


class Stacked(Model):
    """Queries, keys and values behind each other along the axis of the images, heads folded in; then taken apart."""

    def attend(self, x: Tensor, b: int) -> Tensor:
        stacked = self.qkv(x).view(b, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = stacked.reshape(3 * b, HEADS, TOKENS, WIDTH // HEADS).split(b)
        k, v = torch.cat([k, v]).reshape(2, b * HEADS, TOKENS, WIDTH // HEADS).unbind(0)
        out = (q.flatten(0, 1) @ k.mT / 2).softmax(-1) @ v
        return self.proj(out.view(b, HEADS, TOKENS, -1).transpose(1, 2).reshape(b, TOKENS, WIDTH))


class Indexed(Model):
    """Rows and images picked by numbers, a pooling that is a product, tokens written into zeros."""

    def tokens(self, x: Tensor, b: int) -> Tensor:
        made = torch.zeros(b, TOKENS, WIDTH)
        made[:b, 1:] = x
        made[:, :1] = self.token
        return made

    def answer(self, x: Tensor) -> Tensor:
        b = self.batch(x)
        pooled = torch.bmm(torch.ones(b, 1, TOKENS) / TOKENS, x)[:, 0]
        rows = x.gather(1, torch.full((b, 1, WIDTH), 2))[:, 0]
        return self.head(x[torch.arange(b), torch.zeros(b, dtype=torch.int64)] + rows + pooled)


class Picked(Model):
    """Places along tokens and images in one axis, as pooling to one place is exported."""

    def answer(self, x: Tensor) -> Tensor:
        b = self.batch(x)
        places = (torch.arange(b)[:, None] * TOKENS + torch.tensor([3, 0])).reshape(-1)
        rows = x.index_select(1, torch.tensor([2, 1])).mean(1)
        return self.head(x.reshape(b * TOKENS, WIDTH).index_select(0, places).view(b, 2, WIDTH)[:, 0] + rows)


SPELLINGS: dict[str, type[Model]] = {
    "a class token expanded, a view": Model,
    "heads folded into the batch": Folded,
    "tokens first": TokensFirst,
    "tensors made for the batch": Made,
    "windows": Windowed,
    "stacked along the images": Stacked,
    "indexed and written": Indexed,
    "places in all images": Picked,
}


def graph(model: nn.Module, batch: int) -> tuple[torch.fx.GraphModule, tuple[Tensor, ...]]:
    inputs = (torch.randn(batch, TOKENS - 1, WIDTH, generator=torch.Generator().manual_seed(batch)),)
    with torch.no_grad():
        return functional_graph(torch.export.export(model.eval(), inputs)), inputs


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_batch_written_as_a_number_is_opened(spelling: str, batch: int) -> None:
    model = SPELLINGS[spelling](lambda x: batch)
    fixed, example = graph(model, batch)
    opened, edits = OpenBatch(example).apply(fixed)
    assert edits
    assert_answers(opened, InBatches(model, batch))
    assert str(fixed.graph) == str(graph(model, batch)[0].graph), "the graph given is as it was"


@pytest.mark.parametrize("batch", [len, lambda x: int(x.shape[0])], ids=["len(x)", "int(x.shape[0])"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_two_captures_tell_which_constants_are_the_batch(spelling: str, batch: Callable[[Tensor], int]) -> None:
    model = SPELLINGS[spelling](batch)
    (fixed, example), (wider, _) = graph(model, 2), graph(model, 3)
    found = OpenBatch(example, wider).looked(fixed)
    assert not isinstance(found, Refusal), found
    assert_answers(found.graph, model)


def assert_answers(opened: torch.fx.GraphModule, model: nn.Module) -> None:
    """`opened` has an open batch, the attention that the matcher knows, and the model's answers."""
    (site,) = scan(FxGraph(opened), "m").sites
    assert site.core is not None, site.core_reason
    for images in (1, 2, 3, 7):
        x = torch.randn(images, TOKENS - 1, WIDTH, generator=torch.Generator().manual_seed(images))
        with torch.no_grad():
            torch.testing.assert_close(opened(x), model(x), rtol=1e-5, atol=1e-6)
    assert rewritten_sites(opened) == {}


class Alone(Model):
    """One image without an axis of images, [5, 8], attention written out."""

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self.attended(torch.cat([self.token[0], x.squeeze(0)])))

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(TOKENS, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3).unbind(0)
        return x + self.proj(self.mixed(q, k, v).transpose(0, 1).reshape(TOKENS, WIDTH))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[heads, tokens, channels] of each."""
        return (q @ k.mT / 2).softmax(-1) @ v

    def answer(self, x: Tensor) -> Tensor:
        return self.head(x[0])[None]


class AloneInOne(Alone):
    """Attention in one operation, for which the image gets its axis back; the mean of all tokens answers."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]

    def answer(self, x: Tensor) -> Tensor:
        return self.head(x.mean(0)).unsqueeze(0)


class AloneMasked(Alone):
    """A mask for all images, attention in one operation of three axes."""

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(TOKENS, TOKENS).tril().bool())


class AloneInHeads(Alone):
    """Products of one vector each, sums written as such, a head of the image's own tokens [1, 40]."""

    def __init__(self, batch: Callable[[Tensor], int]) -> None:
        super().__init__(batch)
        self.last = nn.Linear(TOKENS * WIDTH, 3)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("hij,hjd->hid", torch.einsum("hid,hjd->hij", q, k).div(2).softmax(-1), v)

    def answer(self, x: Tensor) -> Tensor:
        return self.last(x.view(1, -1)) + self.head(x.split(1)[2])


class Looped(Model):
    """A loop over the images, of which there is one."""

    def attend(self, x: Tensor, b: int) -> Tensor:
        return torch.stack([super(Looped, self).attend(image[None], 1)[0] for image in x.unbind(0)])


class OfAll(Model):
    """What all images have in common, where there is one."""

    def answer(self, x: Tensor) -> Tensor:
        return self.head((x + x.mean(0)).amax(1))


# What is done with the axis of one image, along which no other could be followed.
ALONE: dict[str, type[Model]] = {
    "taken away": Alone,
    "taken away, attention in one operation": AloneInOne,
    "taken away, masked": AloneMasked,
    "taken away, sums of products": AloneInHeads,
    "gone through": Looped,
    "averaged over": OfAll,
}


@pytest.mark.parametrize("spelling", ALONE)
def test_a_graph_of_one_image_is_mapped_over_images_whatever_it_does_with_their_axis(spelling: str) -> None:
    model = ALONE[spelling](lambda x: 1)
    fixed, example = graph(model, 1)
    opened, edits = OpenBatch(example).apply(fixed)
    assert edits
    assert_answers(opened, InBatches(model, 1))
    assert {node.target for node in fixed.graph.find_nodes(op="get_attr")} == {
        node.target for node in opened.graph.find_nodes(op="get_attr")
    }


class Counted(Alone):
    """As many numbers as the image has different values."""

    def answer(self, x: Tensor) -> Tensor:
        return super().answer(x * x.unique().sum())


def test_what_torch_cannot_map_is_told_with_its_node() -> None:
    fixed, example = graph(Counted(lambda x: 1), 1)
    found = map_images(fixed, with_images(example, 2), [0])
    assert found is not None
    assert (found.code, "at _unique2" in found.sentence) == ("batch-refused", True), found


class OneByOne(Model):
    def attend(self, x: Tensor, b: int) -> Tensor:
        return torch.stack([super(OneByOne, self).attend(x[i : i + 1], 1)[0] for i in range(b)])


class TheirOwn(Model):
    """A number for each of four images."""

    def __init__(self, batch: Callable[[Tensor], int]) -> None:
        super().__init__(batch)
        self.own = nn.Parameter(torch.randn(4, 1, 1))
        self.mixing = nn.Parameter(torch.randn(4, 4))


def answering(answer: Callable[[TheirOwn, Tensor], Any]) -> type[Model]:
    """A model that gives `answer` of its attention's result [4, 5, 8]."""
    return type("Answering", (TheirOwn,), {"answer": answer})


def elsewhere(m: TheirOwn, x: Tensor) -> list[Tensor]:
    """Images along the second axis (along the first lie two, as many as images, or not) and the last; and none."""
    return [torch.stack([x, 2 * x]), x.permute(1, 2, 0), m.head.weight * 2, m.head(x[:, 0])]


@pytest.mark.parametrize(("batch", "compared"), [(1, False), (2, False), (4, False), (2, True)])
def test_outputs_may_have_the_images_along_another_axis(batch: int, compared: bool) -> None:
    model = answering(elsewhere)(len if compared else lambda x: batch)
    fixed, example = graph(model, batch)
    wider = graph(model, 3)[0] if compared else None
    opened, _ = OpenBatch(example, wider).apply(fixed)
    axes = FxGraph(opened).image_axes
    assert axes == (1, 2, None, 0)
    assert_answers(opened, InBatches(model, batch, axes))


# what: (the model, the batch that it holds or None for len(x), the code, a part of the sentence)
REFUSED: dict[str, tuple[type[Model], int | None, str, str]] = {
    "half of the images": (answering(lambda m, x: m.head(x[0:2, 0])), 4, "batch-split", "slice"),
    "images in pairs": (answering(lambda m, x: x.reshape(2, 10, 8)), 4, "batch-split", "makes [2, 10, 8] of"),
    "the first image": (answering(lambda m, x: m.head(x[0])), 4, "batch-dropped", "select"),
    "images beside each other": (answering(lambda m, x: x[:, 0] @ x[:, 0].T), 4, "images-mixed", "matmul"),
    "a mean over images": (answering(lambda m, x: x - x.mean(0)), 4, "batch-dropped", "mean"),
    "a softmax over images": (answering(lambda m, x: x.softmax(0)), 4, "images-mixed", "beside others"),
    "images one by one": (answering(lambda m, x: torch.stack(x.unbind(0))), 4, "batch-settled", "unbind"),
    "other tokens of each image": (
        answering(lambda m, x: m.head(x.reshape(20, 8).index_select(0, torch.tensor([0, 6, 11, 15])))),
        4, "images-differ", "takes other parts of each image"),
    "a map of four images": (answering(lambda m, x: m.mixing @ x.flatten(1)), 4, "images-differ", "matmul"),
    "four answers for one image": (answering(lambda m, x: x + m.own), 1, "batch-refused", "add"),
    "a number for each image": (answering(lambda m, x: x + m.own), 4, "images-differ", "add"),
    "a loop over images": (OneByOne, None, "other-operations", "other operations"),
    "a number that grows with the batch": (
        answering(lambda m, x: x * (len(x) + 1)), None, "other-constants", "3 for 2 images is 4 for 3"),
    "a constant made for the batch": (
        answering(lambda m, x: x + torch.tensor([float(i) for i in range(len(x))]).view(-1, 1, 1)),
        None, "batch-in-constant", "lift"),
    "one answer for all": (answering(lambda m, x: x.sum()), None, "no-batch-out", "output 0 as []"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_batch_that_the_code_fixes_is_told_with_its_node(case: str) -> None:
    kind, batch, code, part = REFUSED[case]
    model = kind(len if batch is None else lambda x: batch)
    fixed, example = graph(model, batch or 2)
    wider = graph(model, 3)[0] if batch is None else None
    found = OpenBatch(example, wider).looked(fixed)
    assert isinstance(found, Refusal)
    assert (found.code, part in found.sentence) == (code, True), found
    with pytest.raises(InputError, match="open-batch cannot be applied: the graph"):
        OpenBatch(example, wider, found).apply(fixed)


class Masked(Model):
    """Beside the images, an input [5, 4] whose second axis is as long as the batch by chance."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        return self.answer(self.tokens(x, 4) * other.T[:, :, None])


def test_graphs_that_are_no_fixed_batch_are_refused() -> None:
    model = Model(lambda x: 4)
    fixed, example = graph(model, 4)
    opened = OpenBatch(example).apply(fixed)
    pair = (*example, torch.rand(TOKENS, 4))
    masked = functional_graph(torch.export.export(Masked(lambda x: 4).eval(), pair))
    cases = {
        "no-fixed-batch": OpenBatch(example).looked(opened.graph),
        "other-example": OpenBatch((*example, *example)).looked(fixed),
        "not-exported": OpenBatch(example).looked(torch.fx.symbolic_trace(nn.Linear(WIDTH, 3))),
        "batch-in-input": OpenBatch(pair).looked(masked),
        "still-fixed": OpenBatch(example).ensures(fixed, PassResult(fixed)),
        "other-inputs": OpenBatch(example).ensures(fixed, PassResult(masked)),
    }
    assert {code: getattr(found, "code", found) for code, found in cases.items()} == {code: code for code in cases}


def one_answer_each(x: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.unbind(0))


def small_alone(x: Tensor) -> Tensor:
    if x.abs().max() > 4:
        raise ValueError("there is no row for it")
    return x


@pytest.mark.parametrize(
    ("model", "code", "part"),
    [
        (one_answer_each, "no-batch-out", "gives 2 outputs for 2 images and 3 for one more"),
        (small_alone, "draw-refused", "does not take inputs like its example: there is no row for it"),
    ],
)
def test_what_says_nothing_of_the_images_is_refused(model: Callable[[Tensor], object], code: str, part: str) -> None:
    found = images_mixed(Known(model, drawn_alike((torch.randn(2, 30).clamp(-3, 3),))), model)
    assert isinstance(found, Refusal)
    assert (found.code, part in found.sentence) == (code, True), found
