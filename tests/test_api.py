"""The Python API given what it cannot use: one error of ours that says what, before any work."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from tiny_vits import INPUTS, Attention, encoder
from torch import Tensor, nn

import attnrewrite as ar
from attnrewrite.frontends.sources import load_source

TOKENS = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
PICTURES = torch.zeros(9, 3, 16, 16)

EXAMPLES: dict[str, tuple[Any, str]] = {
    "an array": (TOKENS.numpy(), "example_inputs are a ndarray: give tensors"),
    "a dictionary": ({"x": TOKENS}, "example_inputs are a dict: give tensors"),
    "a text": ("tokens", "example_inputs are a str: give tensors"),
    "a number": (3, "example_inputs are a int: give tensors"),
    "nothing inside": ((None,), "example input 0 is a NoneType: give tensors"),
    "an array inside": ((TOKENS, TOKENS.numpy()), "example input 1 is a ndarray: give tensors"),
    "no image": (TOKENS[:0], r"example input 0 is \[0, 9, 32\] and holds no numbers"),
    "no token": (TOKENS[:, :0], r"example input 0 is \[2, 0, 32\] and holds no numbers"),
    "a shape alone": (TOKENS.to("meta"), "example input 0 is on the meta device"),
    "a sparse one": (TOKENS.to_sparse(), "example input 0 is sparse, nested or quantized"),
    "too many": ((TOKENS, TOKENS), "Attention does not take an input of 9x32"),
    "half precision": (TOKENS.half(), "it computes in float32 and was given float16; .*give float32 example_inputs"),
    "whole numbers": (TOKENS.long(), "it computes in float32 and was given int64; "),
    "one number": (torch.tensor(2.0), "Attention does not take an input of one number"),
}


@pytest.mark.parametrize("case", EXAMPLES)
def test_examples_that_a_model_cannot_run_on(case: str) -> None:
    given, message = EXAMPLES[case]
    for verb in (ar.explain, ar.convert):
        with pytest.raises(ar.InputError, match=message):
            verb(Attention(), given)


def called(name: str) -> nn.Module:
    model = nn.Sequential()
    model.add_module(name, Attention())
    return model


def without_numbers() -> nn.Module:
    with torch.device("meta"):
        return Attention()


class Refusing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise SystemExit(f"no {list(x.shape)}\nat all")


class Locked(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()


class FourAlone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, 9, 32)


class ByName(nn.Module):
    def forward(self, *, x: Tensor) -> Tensor:
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a keyword for a name": (lambda: called("class"), "Sequential calls a part of it 'class'"),
    "a quotation mark in a name": (lambda: called('a"b'), "Sequential calls a part of it 'a\"b'"),
    "a line's end in a name": (lambda: called("a\nb"), r"Sequential calls a part of it 'a\\nb'"),
    "no numbers": (without_numbers, r"Attention: weight qkv\.weight has no numbers \(it is on the meta device"),
    "lazy weights": (lambda: nn.LazyLinear(4), "LazyLinear: weight weight has no numbers"),
    "no forward": (nn.Module, "Module does not take an input of 9x32"),
    "what cannot be copied": (Locked, r"Locked cannot be copied and put in evaluation mode \(TypeError: cannot pickle"),
    "a batch of its own": (FourAlone, "its code settles for a batch of 4; in Python, give example_inputs of so many"),
    "inputs by name alone": (ByName, "its forward takes x by name alone; wrap it"),
    "an exit": (Refusing, r"Refusing does not take an input of 9x32 \(no \[1, 9, 32\]\)"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_captured(case: str) -> None:
    make, message = MODELS[case]
    with pytest.raises(ar.InputError, match=message):
        ar.explain(make(), TOKENS[:1])


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a typing error": ({"input_sise": "3x16x16"}, "unknown keyword 'input_sise': did you mean 'input_size'"),
    "an option misspelt": ({"calibrate": INPUTS}, "unknown keyword 'calibrate': did you mean 'calibration'"),
    "a name in two lines": ({"checkpoint": "a\nb.pth"}, "^cannot read the checkpoint a b.pth: No such file"),
    "no variant": ({"variant": None}, "the variant: None is no str"),
    "options in a text": ({"options": "centred=true"}, "options: 'centred=true' is no Mapping"),
    "an option that is no text": ({"options": {3: 1}}, "unknown option of l1 3"),
    "samples in words": ({"samples": "many"}, "--samples 'many' is no whole number"),
    "part of a sample": ({"samples": 1.5}, "--samples 1.5 is no whole number"),
    "steps without a number": ({"steps": None}, "--steps None is no whole number"),
    "a seed beyond all": ({"seed": 2**64}, "--seed 18446744073709551616 must lie between 0 and"),
    "threads beyond all": ({"threads": 10**6}, "--threads 1000000 must lie between 1 and"),
    "a drop in words": ({"variant": "auto", "max_drop": "half"}, "--max-drop 'half' is no number"),
    "candidates by number": ({"variant": "auto", "max_drop": 1, "candidates": 3}, "--candidates: 3 is no Iterable"),
    "progress to nobody": ({"progress": 3}, "progress is to be a function of"),
    "state nowhere": ({"state": 3}, "state is to be the path of a folder, not 3"),
    "a checkpoint by number": ({"checkpoint": "a\0b"}, "cannot be used as a path: embedded null byte"),
    "half a pixel": ({"input_size": (3, 16.5, 16)}, r"input size \(3, 16.5, 16\) is not CHANNELSxHEIGHTxWIDTH"),
    "a size by number": ({"input_size": 3.5}, "input size 3.5 is not CHANNELSxHEIGHTxWIDTH"),
    "images on no device": ({"calibration": PICTURES.to("meta")}, "not one that is sparse, or on the meta device"),
    "images without numbers": ({"calibration": PICTURES * np.nan}, "image 0 of the iterable holds NaN or infinity"),
    "labels in words": ({"calibration": [(PICTURES[0], "cat")]}, "a label of the iterable is 'cat'"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_out_of_any_sense(case: str) -> None:
    given, message = OPTIONS[case]
    with pytest.raises(ar.InputError, match=message):
        ar.convert(encoder(), INPUTS, **given)


@pytest.mark.parametrize("keep", [3, [3], [None]])
def test_sites_to_keep_are_named_by_texts(keep: Any) -> None:
    from attnrewrite.conversion.sites import kept_sites
    from attnrewrite.site import Scan

    with pytest.raises(ar.InputError, match="--keep"):
        kept_sites(Scan("m", "fx", (), ()), keep)


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "models in a list": (lambda: ar.compare([encoder()], INPUTS), "models: .* is no Mapping"),
    "no target": (lambda: ar.lower(encoder(), None, "out"), "the target: None is no str"),
    "what is no scan": (lambda: ar.supported(encoder()), "what is asked about: .* is no Scan"),
    "no batch": (
        lambda: ar.evaluate(encoder(), PICTURES, batch_size=0, input_size="3x16x16"),
        "--batch-size 0 must lie between 1 and",
    ),
    "a model of tokens on pictures": (
        lambda: ar.convert(Attention(), TOKENS, calibration=PICTURES),
        r"input x is \[9, 3, 16, 16\] in the data, and the model takes \[N, 9, 32\]",
    ),
    "another batch than the model's": (
        lambda: ar.evaluate(AtMostTwo(), PICTURES, batch_size=4, input_size="3x16x16"),
        r"AtMostTwo does not take a batch of 4 images of 3x16x16 \(no more\): give the batch that it takes",
    ),
}


class AtMostTwo(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:
            raise ValueError("no more")
        return x.mean((2, 3))


@pytest.fixture(scope="module")
def done() -> ar.Conversion:
    return ar.convert(encoder(), INPUTS, variant="l1")


OWN = " has its weights and inputs already: leave out "
READY: dict[str, tuple[dict[str, Any], str]] = {
    "a typing error": ({"bogus": 3}, "unknown keyword 'bogus': .*known are .*checkpoint, .*mean, "),
    "a near miss": ({"meen": 0.5}, "unknown keyword 'meen': did you mean 'mean'"),
    "weights": ({"checkpoint": "w.pth"}, f"{OWN}checkpoint$"),
    "a size": ({"input_size": "3x16x16", "checkpoint": "w.pth"}, f"{OWN}checkpoint, input_size$"),
    "inputs": ({"example_inputs": INPUTS}, f"{OWN}example_inputs$"),
    "half of how pictures are read": ({"mean": 0.5}, "--mean without --std"),
}


@pytest.mark.parametrize("case", READY)
def test_what_a_model_that_is_ready_would_not_heed_is_refused(case: str, done: ar.Conversion) -> None:
    given, message = READY[case]
    for model in (done, load_source(encoder(), INPUTS)):
        for call in (ar.explain, partial(ar.lower, target="host", out="out")):
            with pytest.raises(ar.InputError, match=message):
                call(model, **given)
        with pytest.raises(ar.InputError, match=message):
            ar.compare({"a": model}, **given)


def test_how_pictures_are_read_is_heeded_by_a_conversion(done: ar.Conversion, tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((4, 16, 16, 3), np.uint8))
    with pytest.raises(ar.InputError, match="give --mean and --std"):
        ar.evaluate(done, tmp_path / "d.npz")
    assert len(ar.evaluate(done, tmp_path / "d.npz", mean=0.5, std=0.5)) == 2
    with pytest.raises(ar.InputError, match="unknown keyword 'bogus'"):
        ar.evaluate(done, tmp_path / "d.npz", bogus=3)


def test_of_several_models_those_that_are_ready_heed_what_is_theirs(done: ar.Conversion) -> None:
    """What is given for all may be meant for the others."""
    found = ar.compare({"model": encoder(), "done": done}, INPUTS, input_size="3x16x16", mean=0.5, std=0.5)
    assert {row.model for row in found.rows} == {"model", "done"}
    with pytest.raises(ar.InputError, match=OWN):
        ar.compare({"one": done, "two": done}, INPUTS)


FILES: dict[str, tuple[dict[str, Any], str]] = {
    "a typing error": ({"inputsize": "3x16x16"}, "unknown keyword 'inputsize': did you mean 'input_size'"),
    "inputs": ({"example_inputs": INPUTS}, r"m\.onnx says itself what it takes: leave out example_inputs"),
    "a mean that is none": ({"mean": "x", "std": 1}, "--mean 'x' is not a number"),
    "weights": ({"checkpoint": "w.pth"}, "takes no --checkpoint"),
}


@pytest.mark.parametrize("case", FILES)
def test_what_a_scan_of_an_onnx_file_would_not_heed_is_refused(case: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="needs onnx")
    given, message = FILES[case]
    (tmp_path / "m.onnx").write_text("x")
    with pytest.raises(ar.InputError, match=message):
        ar.explain(tmp_path / "m.onnx", **given)


def test_what_a_package_would_not_heed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.mlpackage").mkdir()
    for given in ({"mean": 0.5}, {"example_inputs": INPUTS}):
        with pytest.raises(ar.InputError, match=f"laid out as it is: leave out {next(iter(given))}"):
            ar.lower(tmp_path / "m.mlpackage", "coreml-npu", tmp_path / "out", **given)


@pytest.mark.parametrize("case", CALLS)
def test_other_calls(case: str) -> None:
    call, message = CALLS[case]
    with pytest.raises(ar.InputError, match=message):
        call()


def test_an_error_carries_the_site_that_it_is_about() -> None:
    with pytest.raises(ar.NothingMatchedError) as caught:
        ar.convert(Attention(), TOKENS, variant="masked")
    assert caught.value.site == "site0"


def test_a_softmax_of_one_number_is_no_attention() -> None:
    scan = ar.explain(nn.Softmax(-1), torch.tensor(1.0))
    assert (len(scan.sites), [miss.code for miss in scan.near_misses]) == (0, ["output"])
