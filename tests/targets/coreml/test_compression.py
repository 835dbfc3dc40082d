"""Packages in fewer bytes: what each operator holds, what a method may make of a weight, what it costs on images."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import attnrewrite as ar
from attnrewrite.cli.output import made_lines
from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.targets.base import Artifact, get_target, size_bytes
from attnrewrite.targets.coreml import compression, interpreter, package
from attnrewrite.targets.coreml.operators.compressed import OPERATORS
from attnrewrite.targets.prepare import canonical, specialise
from attnrewrite.targets.record import Compression


def packed(numbers: np.ndarray, bits: int) -> Tensor:
    """Numbers of so many bits each in bytes, the least significant bit first."""
    each = np.unpackbits(numbers.reshape(-1, 1).astype(np.uint8), axis=1, bitorder="little")[:, :bits]
    return torch.from_numpy(np.packbits(each.reshape(-1), bitorder="little"))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([1, 2, 4, 6, 8]), st.tuples(*[st.integers(1, 5)] * 3), st.integers(0, 99))
def test_a_palette_is_looked_up_in_both_spellings(bits: int, shape: tuple[int, ...], seed: int) -> None:
    random = np.random.default_rng(seed)
    palette, places = random.normal(size=2**bits).astype(np.float32), random.integers(0, 2**bits, shape)
    lookup, lut = OPERATORS["constexpr_lut_to_dense"], torch.from_numpy(palette)
    in_bytes = lookup(indices=packed(places, bits), lut=lut, shape=torch.tensor(shape))
    whole = lookup(indices=torch.from_numpy(places), lut=lut.view(*[1] * len(shape), -1, 1))
    for found in (in_bytes, whole):
        np.testing.assert_array_equal(found.numpy(), palette[places])


@settings(max_examples=30, deadline=None)
@given(st.tuples(*[st.integers(1, 5)] * 3), st.integers(0, 99))
def test_what_is_not_zero_is_put_in_its_place_in_both_spellings(shape: tuple[int, ...], seed: int) -> None:
    random = np.random.default_rng(seed)
    mask = random.integers(0, 2, shape)
    dense = random.normal(size=shape).astype(np.float32) * mask
    place, values = OPERATORS["constexpr_sparse_to_dense"], torch.from_numpy(dense[mask != 0])
    in_bytes = place(nonzero_data=values, mask=packed(mask, 1), shape=torch.tensor(shape))
    for found in (in_bytes, place(nonzero_data=values, mask=torch.from_numpy(mask))):
        np.testing.assert_array_equal(found.numpy(), dense)


@settings(max_examples=30, deadline=None)
@given(st.tuples(*[st.integers(1, 5)] * 3), st.integers(0, 2), st.integers(0, 99))
def test_steps_are_counted_along_an_axis_and_in_blocks(shape: tuple[int, ...], axis: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    whole = random.integers(-128, 128, shape).astype(np.int8)
    along = [size if each == axis else 1 for each, size in enumerate(shape)]
    step, zero = random.uniform(0.1, 1, along).astype(np.float32), random.integers(-9, 9, along).astype(np.int8)
    expected = (whole.astype(np.float32) - zero) * step
    data, scale, offset = (torch.from_numpy(each) for each in (whole, step, zero))
    by_axis = OPERATORS["constexpr_affine_dequantize"](
        quantized_data=data, zero_point=offset.reshape(-1), scale=scale.reshape(-1), axis=torch.tensor(axis)
    )
    np.testing.assert_allclose(by_axis.numpy(), expected, rtol=1e-6)
    in_blocks = OPERATORS["constexpr_blockwise_shift_scale"]
    np.testing.assert_allclose(in_blocks(data=data, scale=scale, offset=offset).numpy(), expected, rtol=1e-6)
    two, twice = data.repeat_interleave(2, 0), np.repeat(whole.astype(np.float32) * step, 2, 0)
    np.testing.assert_allclose(in_blocks(data=two, scale=scale).numpy(), twice, rtol=1e-6)


def test_a_palette_that_nobody_here_makes_is_not_read_as_another() -> None:
    with pytest.raises(NotImplementedError, match="a palette for each group"):
        OPERATORS["constexpr_lut_to_dense"](indices=torch.zeros(2, 2), lut=torch.zeros(2, 1, 4, 1))


W = torch.tensor([[1.0, -0.5, 0.25, 0.1], [0.2, 0.1, -0.4, 0.05]])
STEPS = {"scale": torch.tensor([1 / 127, 0.4 / 127]), "axis": torch.tensor(0)}
PALETTE = {"lut": torch.tensor([-0.5, 0.0, 0.2, 1.0])}
# A method, what a weight became, and whether it may have.
STANDS: dict[str, tuple[str, Tensor, dict[str, Tensor], bool]] = {
    "rounded to a step": ("int8", W + torch.tensor([[0.5 / 127], [0.2 / 127]]), STEPS, True),
    "a step further in a fine row": ("int8", W + 0.5 / 127, STEPS, False),
    "by steps of blocks": ("int8", W + 0.5 / 127, {"scale": torch.full((1, 1), 1 / 127)}, True),
    "the nearest": ("palette4", torch.tensor([[1, -0.5, 0.2, 0.2], [0.2, 0.0, -0.5, 0.0]]), PALETTE, True),
    "not the nearest": ("palette4", torch.tensor([[1, -0.5, 0.2, 0.2], [0.2, 0.0, -0.5, 0.2]]), PALETTE, False),
    "the smallest left out": ("prune", torch.where(W.abs() > 0.2, W, 0), {}, True),
    "a larger one left out": ("prune", torch.where(W.abs() < 0.5, W, 0), {}, False),
    "another value": ("prune", torch.where(W.abs() > 0.2, 2 * W, 0), {}, False),
}


@pytest.mark.parametrize("case", STANDS)
def test_what_a_method_may_make_of_a_weight(case: str) -> None:
    method, found, operands, may = STANDS[case]
    assert compression.METHODS[method].stands_for(W, found, operands) is may


class Mixer(nn.Module):
    """[B, 1, 8, 8] -> [B, 4], by way of 64 channels."""

    def __init__(self, seed: int = 0, bend: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.bend = bend
        generator = torch.Generator().manual_seed(seed)
        self.patches, self.mix, self.head = nn.Conv2d(1, 64, 4, 4), nn.Linear(64, 64), nn.Linear(64, 4)
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.tanh(self.patches(x)).flatten(2).transpose(1, 2)
        return self.head(self.bend(self.mix(tokens)).mean(1))


def twice(x: Tensor) -> Tensor:
    return torch.tanh(torch.tanh(x))


X = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
HOLDS = {
    "int8": {"iOS17": "constexpr_affine_dequantize", "iOS18": "constexpr_blockwise_shift_scale"},
    "palette6": dict.fromkeys(package.MINIMUMS, "constexpr_lut_to_dense"),
    "palette4": dict.fromkeys(package.MINIMUMS, "constexpr_lut_to_dense"),
    "prune": dict.fromkeys(package.MINIMUMS, "constexpr_sparse_to_dense"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A package for a system, of one model or another."""
    pytest.importorskip("coremltools", reason="coremltools is not installed")

    @cache
    def make(minimum: str, *model: Any) -> Path:
        program = canonical(specialise(Mixer(*model).eval(), (X,)))
        wanted = package.Wanted(minimum=minimum, about="a mixer")
        return package.convert(program, tmp_path_factory.mktemp("whole"), "FLOAT16", wanted)

    return make


def answers(path: Path) -> Tensor:
    program = interpreter.load(path)
    (found,) = interpreter.interpret(program, {next(iter(program.functions["main"].inputs)): X}).outputs.values()
    return found


@pytest.mark.parametrize("minimum", package.MINIMUMS)
@pytest.mark.parametrize("method", compression.METHODS)
def test_a_compressed_package_is_the_same_program_of_other_weights(
    method: str, minimum: str, made: Callable[..., Path], tmp_path: Path
) -> None:
    import coremltools as ct
    from coremltools.optimize import coreml as optimize

    if refused := compression.refusal(method):
        pytest.skip(str(refused))
    path = Path(shutil.copytree(made(minimum), tmp_path / package.NAME))
    before, exact = size_bytes(path), answers(path)
    found = compression.compress(path, method)
    assert (found.method, found.weights) == (method, 1)
    assert (found.size_bytes_before, found.size_bytes) == (before, size_bytes(path))
    held = [each for each in interpreter.load(path).functions["main"].operations if "constexpr" in each.op_type]
    assert [each.op_type for each in held] == [HOLDS[method][minimum]]
    model = ct.models.MLModel(str(path), skip_model_load=True)
    assert model.short_description == "a mixer"
    assert model.user_defined_metadata["attnrewrite.compression"] == method
    # coremltools' own decompression is the other opinion on what the package holds.
    with package.quiet():
        optimize.decompress_weights(model).save(str(tmp_path / "whole.mlpackage"))
    torch.testing.assert_close(answers(path), answers(tmp_path / "whole.mlpackage"), rtol=0, atol=0)
    assert 0 < (answers(path) - exact).abs().max() < exact.abs().max()


class Scaled(nn.Module):
    """A scale that coremltools merges with the weights before it, as it compresses them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(64, 64), nn.Parameter(torch.logspace(-6, 0, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def test_what_coremltools_merges_is_merged_before_anything_is_compared(tmp_path: Path) -> None:
    target = get_target("coreml-npu").configured(compress="int8")
    made = target.lower("scaled", Scaled().eval(), (torch.randn(1, 4, 64),), tmp_path, threads=1)
    assert made.compression is not None
    assert made.compression.weights == 1


def test_a_package_of_other_weights_or_another_program_is_noticed(made: Callable[..., Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(made("iOS17", 1), tmp_path / package.NAME))
    compression.compress(path, "int8")
    ours, theirs = interpreter.load(made("iOS17")), interpreter.load(path)
    with pytest.raises(CheckFailedError, match=r"compressed by int8, operator '\w+' reads '\w+', which does not stand"):
        compression.compare(ours, theirs, "int8")
    for bend, why in ((torch.sigmoid, r"operator '\w+' is another than"), (twice, "is another program")):
        other = interpreter.load(made("iOS17", 1, bend))
        with pytest.raises(CheckFailedError, match=f"compressed by int8, .*{why}"):
            compression.compare(other, theirs, "int8")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x, y: (x, y), None),
        (lambda x, y: (y, x), "the package gives its outputs in another order"),
        (lambda x, y: (x, x), "operator 'd' reads 'a', which does not stand for what it read before"),
    ],
)
def test_wires_that_are_crossed_are_noticed(change: Callable[[Any, Any], tuple[Any, Any]], why: str | None) -> None:
    pytest.importorskip("coremltools", reason="coremltools is not installed")
    from coremltools.converters.mil.mil import Builder as mb

    def program(change: Callable[[Any, Any], tuple[Any, Any]], in_the_end: bool) -> Any:
        @mb.program(input_specs=[mb.TensorSpec(shape=(1, 4))])
        def built(x: Any) -> Any:
            first, second = mb.exp(x=x, name="a"), mb.exp(x=x, name="b")
            return [mb.tanh(x=each, name=name) for each, name in zip(change(first, second), "cd", strict=True)]

        if in_the_end:
            outputs = built.functions["main"].outputs
            built.functions["main"].set_outputs([*reversed(outputs)])
            for value, name in zip(outputs, "dc", strict=True):
                value.name = name
        return built

    ours, order = program(lambda x, y: (x, y), False), why is not None and "order" in why
    theirs = program((lambda x, y: (x, y)) if order else change, order)
    if why is None:
        assert compression.compare(ours, theirs, "int8") == ()
        return
    with pytest.raises(CheckFailedError, match=why):
        compression.compare(ours, theirs, "int8")


def test_what_compression_costs_is_measured_on_pictures(tmp_path: Path) -> None:
    ct = pytest.importorskip("coremltools", reason="coremltools is not installed")
    random = np.random.default_rng(0)
    pictures, model = random.integers(0, 256, (6, 8, 8), dtype=np.uint8), Mixer().eval()
    with torch.no_grad():
        right = model((torch.from_numpy(pictures)[:, None] / 255 - 0.5) / 0.5).argmax(1).numpy()
    right[0] = (right[0] + 1) % 4  # one that it has wrong
    np.savez(tmp_path / "test.npz", x=pictures, y=right)
    how: dict[str, Any] = {"input_size": "1x8x8", "mean": 0.5, "std": 0.5, "image_input": True, "labels": list("abcd")}
    made = ar.lower(model, "coreml-npu", tmp_path / "out", compress="int8", data=tmp_path / "test.npz", **how)
    record = json.loads((tmp_path / "out" / "artifact.json").read_text())
    assert record["compression"]["method"] == "int8"
    assert 0 < record["compression"]["size_bytes"] < record["compression"]["size_bytes_before"]
    assert record["measured"] == made.measured
    assert made.measured["model"]["top1"] == pytest.approx(100 * 5 / 6)
    found = made.measured["artifact"]
    assert (found["n"], found["top1"], found["agreement"]) == (6, pytest.approx(100 * 5 / 6), 100)
    assert 0 < found["logit_mse"] < 1e-3
    assert made.max_abs_error <= made.tolerance
    said = ct.models.MLModel(str(made.path / package.NAME), skip_model_load=True).get_spec().description
    assert (said.input[0].type.WhichOneof("Type"), said.predictedFeatureName) == ("imageType", "classLabel")


def test_the_terminal_tells_bytes_and_accuracy() -> None:
    how = {"model": "it", "n": 4}
    measured = {
        "model": {**how, "top1": 75.0, "agreement": None, "logit_mse": None, "error": None},
        "artifact": {**how, "top1": 50.0, "agreement": 75.0, "logit_mse": 0.25, "error": None},
    }
    files = ("artifact.json", "model.mlpackage")
    artifact = Artifact("it", "coreml-npu", Path("out"), files, 9, 0.0, 1.0, "looked at it", "none")
    told = replace(artifact, compression=Compression("int8", 17, 2000, 1010), measured=measured)
    assert made_lines(artifact) == "out: artifact.json, model.mlpackage (checked: looked at it)"
    assert made_lines(told).splitlines()[1:] == [
        "int8 on 17 weights: 1,010 bytes, 50% of 2,000",
        "the model on 4 images: top-1 75.00 %",
        "the artifact on 4 images: top-1 50.00 %, agreement with the model 75.00 %, "
        "squared distance of the outputs 0.25 on average",
    ]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no such method": ("coreml-npu", {"compress": "int9"}, "unknown compression 'int9': did you mean 'int8'"),
    "another target": ("host", {"compress": "int8"}, "'host' has no --compress: leave it out, or lower for coreml-npu"),
    "data for another target": ("gpu", {"data": [X]}, "'gpu' has no --data: leave it out, or lower for host"),
    "tensors for pictures": (
        "coreml-npu", {"data": [X], "image_input": True, "mean": 0.5, "std": 0.5}, "the artifact takes pictures: give"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_made_or_measured_is_refused(case: str, tmp_path: Path) -> None:
    pytest.importorskip("coremltools", reason="coremltools is not installed")
    target, options, why = REFUSED[case]
    with pytest.raises(InputError, match=why):
        ar.lower(Mixer().eval(), target, tmp_path / "out", example_inputs=(X,), **options)
    assert not (tmp_path / "out").exists()


def test_palettes_without_scikit_learn_are_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="--compress palette6 finds its palettes with scikit-learn: pip install sc"):
        ar.lower(Mixer().eval(), "coreml-npu", tmp_path / "out", example_inputs=(X,), compress="palette6")
    assert compression.refusal("int8") is None
