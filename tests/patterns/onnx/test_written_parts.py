"""What a file writes into a part of a tensor: a sum is read as one, and what fills a box as a write into slices."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx_runs import run
from onnx_spellings import proto
from torch import Tensor, nn

import attnrewrite as ar
from attnrewrite.frontends.batches import any_batch
from attnrewrite.frontends.sources import load_source
from attnrewrite.patterns.onnx.graph import OnnxGraph
from attnrewrite.patterns.onnx.written_parts import box_of

TOKENS = torch.randn(5, 9, 16, generator=torch.Generator().manual_seed(1))


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[slice]]:
    size = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    firsts = [draw(st.integers(0, length - 1)) for length in size]
    lasts = [draw(st.integers(first + 1, length)) for first, length in zip(firsts, size, strict=True)]
    steps = [draw(st.integers(1, 3)) for _ in size]
    axes = draw(st.integers(1, len(size)))
    return tuple(size), [slice(*ends) for ends in list(zip(firsts, lasts, steps, strict=True))[:axes]]


@given(_boxes(), st.booleans(), st.randoms(use_true_random=False))
def test_a_box_is_found_and_nothing_else(
    drawn: tuple[tuple[int, ...], list[slice]], from_behind: bool, random: Random
) -> None:
    size, ranges = drawn
    places = np.moveaxis(np.mgrid[tuple(ranges)], 0, -1)
    found = {axis: range(size[axis])[cut] for axis, cut in enumerate(ranges)}
    wanted = {axis: positions for axis, positions in found.items() if positions != range(size[axis])}
    assert box_of(places - np.array(size[: len(ranges)]) * from_behind, size) == wanted
    order = np.arange(len(places))
    random.shuffle(order)
    assert box_of(places[order], size) == (wanted if (order == np.arange(len(places))).all() else None)
    assert box_of(places[None], size) is None, "more axes than it says positions of"


class _Relative(nn.Module):
    """[B, 9, 16] -> [B, 16]: a class token and a picture of 2 x 4, its relative positions as MViTv2 adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.rows, self.columns = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        images = x.shape[0]
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(2, 3) * 8**-0.5
        picture = query[:, :, 1:].view(images, 2, 2, 4, 8)
        scores[:, :, 1:, 1:] = (
            scores[:, :, 1:, 1:].view(images, 2, 2, 4, 2, 4)
            + (picture @ self.rows)[..., None]
            + (picture @ self.columns)[..., None, :]
        ).view(images, 2, 8, 8)
        return self.proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))[:, 0]


class _Shifted(nn.Module):
    """[B, 9, 16] -> [B, 16]: windows of two tokens, 2 x 2 of them, of which the last row and column are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.rows, self.columns = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        windows = self.qkv(x[:, 1:].reshape(-1, 4, 2, 16))
        query, key, value = windows.unflatten(-1, (3, 2, 8)).permute(3, 0, 4, 1, 2, 5)
        scores = query @ key.transpose(-2, -1) * 8**-0.5
        scores[:, :, -2:] += self.rows
        scores[:, :, 1::2] += self.columns
        return self.proj((scores.softmax(-1) @ value).permute(0, 2, 3, 1, 4).flatten(3)).mean((1, 2))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("axes", [None, {"x": {0: "batch"}}], ids=["one", "open"])
@pytest.mark.parametrize("kind", [_Relative, _Shifted])
def test_what_is_added_to_parts_of_the_scores_is_a_bias(
    kind: Callable[[], nn.Module], axes: dict[str, dict[int, str]] | None, dynamo: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, file, images = kind().eval(), tmp_path / "model.onnx", TOKENS[: 2 if axes else 1]
    shapes = {"dynamic_shapes": [{0: "batch"}]} if dynamo and axes else {"dynamic_axes": None if dynamo else axes}
    torch.onnx.export(model, (images,), file, input_names=["x"], dynamo=dynamo, verbose=False, **shapes)
    (site,) = ar.explain(file).sites
    assert site.core is not None
    done = ar.convert(file, variant="softmax")
    folder = done.save(tmp_path / "out")
    (found,) = run(ir.load(folder / "model.onnx"), images.numpy())
    with torch.no_grad():
        wanted = model(TOKENS)
        np.testing.assert_allclose(found, wanted[: len(images)], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(done.module(TOKENS), wanted, rtol=1e-4, atol=1e-5)
    assert len(ar.convert(file, variant="l1", options={"approximate": True}).plan.placements) == 1


class _Assigned(nn.Module):
    """Numbers in place of others, in a part of what was computed."""

    def forward(self, x: Tensor) -> Tensor:
        made = x.sin()
        made[:, 2:4, 3:] = x[:, :2, 3:].cos()
        return made * 2


@pytest.mark.filterwarnings("ignore")
def test_a_batch_of_one_in_the_positions_written_to_is_opened(tmp_path: Path) -> None:
    file = tmp_path / "assigned.onnx"
    torch.onnx.export(_Assigned(), (TOKENS[:1],), file, dynamo=False)
    assert "ScatterND" in {node.op_type for node in ir.load(file).graph}
    torch.testing.assert_close(any_batch(load_source(file))(TOKENS), _Assigned()(TOKENS))


def test_what_is_written_may_follow_from_numbers_of_no_known_size() -> None:
    body = """
      places = Constant<value=int64[2,1]{0,1}>()
      i = NonZero(x)
      f = Cast<to=1>(i)
      size = Constant<value_ints=[2, 9, 16]>()
      laid = Reshape(f, size)
      a = ScatterND(x, places, laid)
      more = Add(f, f)
      laid2 = Reshape(more, size)
      y = ScatterND(a, places, laid2)"""
    model = ir.serde.deserialize_model(proto(body, 17, "float[2,9,16] x", "float[2,9,16] y"))
    assert [node.op_type for node in OnnxGraph(model).prepared.model.graph].count("ScatterND") == 2


def test_a_number_that_is_written_is_no_sum() -> None:
    body = """
      places = Constant<value=int64[1,1]{0}>()
      c = Constant<value=float[1,1,1]{1.0}>()
      y = ScatterND(x, places, c)"""
    model = ir.serde.deserialize_model(proto(body, 17, "float[2,1,1] x", "float[2,1,1] y"))
    assert "ScatterND" in {node.op_type for node in OnnxGraph(model).prepared.model.graph}
