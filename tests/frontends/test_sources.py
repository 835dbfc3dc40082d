"""Every kind of source gives the same model that was saved, and what cannot be used is refused in one line."""

import argparse
import json
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from attnrewrite.errors import InputError
from attnrewrite.frontends.sources import Origin, Source, load_source
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.images.preprocessing import Preprocessing

SIZE = "3x16x16"
X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def trained(models_file: Path) -> nn.Module:
    """The model of the file with weights that no seed gives again."""
    model = load_source(f"{models_file}:vit", input_size=SIZE).model
    assert model is not None
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    return model


def logits(source: Source) -> Tensor:
    module = source.model if source.program is None else source.program.module()
    assert module is not None
    with torch.no_grad():
        return module(X)


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    return torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},))


# What a state dict may have been saved as: (file name, what torch.save or safetensors is given).
SAVED: dict[str, tuple[str, Callable[[dict], object]]] = {
    "safetensors": ("w.safetensors", lambda state: state),
    "plain": ("w.pth", lambda state: state),
    "half precision": ("w.bin", lambda state: {name: value.half() for name, value in state.items()}),
    "state_dict": ("w.ckpt", lambda state: {"state_dict": state, "epoch": 3}),
    "model, with the script's arguments": ("w.pt", lambda s: {"model": s, "args": argparse.Namespace(lr=0.1)}),
    "model_state_dict": ("w.pt", lambda state: {"model_state_dict": state, "optimizer": {"state": {}}}),
    "nested twice": ("w.pt", lambda state: {"model": {"state_dict": state}}),
    "module.": ("w.pt", lambda state: {f"module.{name}": value for name, value in state.items()}),
    "both prefixes": ("w.pt", lambda s: OrderedDict((f"module._orig_mod.{name}", v) for name, v in s.items())),
}


@pytest.mark.parametrize("case", SAVED)
def test_checkpoints_however_they_were_saved(tmp_path: Path, models_file: Path, trained: nn.Module, case: str) -> None:
    name, wrap = SAVED[case]
    content = wrap(trained.state_dict())
    (save_file if name.endswith("safetensors") else torch.save)(content, tmp_path / name)  # type: ignore[operator]
    source = load_source(f"{models_file}:vit", checkpoint=tmp_path / name, input_size=SIZE)
    tolerance = 2e-2 if case == "half precision" else 0
    torch.testing.assert_close(logits(source), logits(load_source(trained, X)), rtol=0, atol=tolerance)


def test_a_prefix_that_the_model_has_itself_stays(tmp_path: Path) -> None:
    wrapped = nn.Sequential(OrderedDict(module=nn.Conv2d(3, 2, 16)))
    torch.save(wrapped.state_dict(), tmp_path / "w.pt")
    load_source(wrapped, checkpoint=tmp_path / "w.pt", input_size=SIZE)


def without(*names: str) -> Callable[[dict], dict]:
    return lambda state: {name: value for name, value in state.items() if name not in names}


class Code:
    """A pickle that would run a command when it is loaded."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch ran",)


def truncated(path: Path, state: dict) -> None:
    torch.save(state, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def safetensors_cut(path: Path, state: dict) -> None:
    save_file(state, path)
    path.write_bytes(path.read_bytes()[:-100])


def pickled(content: object, protocol: int) -> Callable[[Path, dict], object]:
    return lambda path, state: path.write_bytes(pickle.dumps(content, protocol))


def torch_saved(wrap: Callable[[dict], object]) -> Callable[[Path, dict], None]:
    return lambda path, state: torch.save(wrap(state), path)


BAD_CHECKPOINTS: dict[str, tuple[str, Callable[[Path, dict], object], str]] = {
    "absent": ("w.pt", lambda path, state: None, r"cannot read the checkpoint .*w\.pt: No such file"),
    "empty": ("w.pt", lambda path, state: path.touch(), "is empty"),
    "folder": ("w.pt", lambda path, state: path.mkdir(), "is a folder"),
    "web page": ("w.pt", lambda path, state: path.write_text("\n<!DOCTYPE html>"), "is a web page"),
    "lfs": ("w.pt", lambda path, state: path.write_text("version https://git-lfs.github.com/spec/v1"), "git lfs pull"),
    "truncated": ("w.pt", truncated, "is truncated or is not a PyTorch checkpoint"),
    "truncated safetensors": ("w.safetensors", safetensors_cut, "is truncated or is not a safetensors file"),
    "noise": ("w.pt", lambda path, state: path.write_bytes(bytes(range(7, 207))), "w.pt is damaged"),
    "another suffix": ("w.npz", lambda path, state: path.touch() or path.write_text("x"), "is a file ending in"),
    "code": ("w.pt", torch_saved(lambda s: {"state_dict": s, "extra": Code()}), r"would run code \(\w+.system\)"),
    "code in a plain pickle": ("w.pt", pickled(Code(), 2), r"would run code \(\w+.system\)"),
    "code in a newer pickle": ("w.pt", pickled(Code(), 4), "nothing in it ran"),
    "a whole model": (
        "w.pt",
        torch_saved(lambda s: nn.Linear(2, 2)),
        r"would run code \(torch.nn.modules.linear.Linear\)",
    ),
    "a list": ("w.pt", torch_saved(lambda s: list(s)), "holds a list, not a state dict"),
    "no tensors": (
        "w.pt",
        torch_saved(lambda s: {"weights": s, "epoch": 1}),
        r"2 of its 2 entries are no tensors \(weights",
    ),
    "missing": ("w.pt", torch_saved(without("head.bias", "token")), r"2 missing \(token, head.bias\)"),
    "unexpected": (
        "w.pt",
        torch_saved(lambda s: s | {"a": X, "b": X, "c": X, "d": X}),
        r"4 unexpected \(a, b, c, \.\.\.\)",
    ),
    "another shape": (
        "w.pt",
        torch_saved(lambda s: s | {"head.weight": torch.zeros(9, 16)}),
        r"1 of another shape \(head.weight is 9x16 in the file and 5x16 in the model\)",
    ),
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_bad_checkpoints(
    tmp_path: Path, models_file: Path, trained: nn.Module, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    name, make, message = BAD_CHECKPOINTS[case]
    monkeypatch.chdir(tmp_path)
    make(tmp_path / name, trained.state_dict())
    with pytest.raises(InputError, match=message) as caught:
        load_source(f"{models_file}:vit", checkpoint=name, input_size=SIZE)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_module_is_taken_in_evaluation_mode_and_stays_as_it_was(tmp_path: Path, models_file: Path) -> None:
    model = load_source(f"{models_file}:vit", input_size=SIZE).model
    assert model is not None
    assert load_source(model, (X,)).model is model
    model.train()
    torch.save({name: torch.zeros_like(value) for name, value in model.state_dict().items()}, tmp_path / "w.pt")
    source = load_source(model, X, checkpoint=tmp_path / "w.pt", mean=0.5, std=(0.1, 0.2, 0.3))
    assert model.training
    assert torch.count_nonzero(logits(source)) == 0
    assert torch.count_nonzero(model.head.weight) > 0
    assert source == Source("Vit", source.model, None, (X,), Preprocessing((0.5,), (0.1, 0.2, 0.3)))


def test_a_program_in_memory_in_a_file_and_in_a_converted_folder(tmp_path: Path, trained: nn.Module) -> None:
    program = exported(trained)
    wanted = logits(load_source(trained, X))
    torch.export.save(program, tmp_path / "vit.pt2")
    saved = load_source(tmp_path / "vit.pt2")
    folder = tmp_path / "converted"
    folder.mkdir()
    torch.export.save(program, folder / "model.pt2")
    origin = Origin("timm:x", None, (3, 16, 16), (0.5,), (0.25,), 0.9, "bilinear")
    (folder / "report.json").write_text(json.dumps({"source": asdict(origin)}))
    converted = load_source(f"{folder}/")
    for source, name in ((load_source(program), "program"), (saved, "vit"), (converted, "converted")):
        torch.testing.assert_close(logits(source), wanted, rtol=0, atol=1e-6)
        assert source.name == name
        assert source.input_size == (3, 16, 16)
    assert saved.origin == Origin(str(tmp_path / "vit.pt2"), None, (3, 16, 16))
    assert (converted.origin, converted.folder) == (origin, folder)
    assert converted.preprocessing == Preprocessing((0.5,), (0.25,), 0.9, "bilinear")


def test_an_origin_loads_the_same_model_again(
    tmp_path: Path, models_file: Path, trained: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(trained.state_dict(), tmp_path / "w.pt")
    monkeypatch.chdir(models_file.parent)
    source = load_source(
        f"{models_file.name}:vit", checkpoint=os.path.relpath(tmp_path / "w.pt"), input_size=SIZE, mean=0.5, std=0.25
    )
    assert source.origin is not None
    origin = Origin(**json.loads(json.dumps(asdict(source.origin))))
    monkeypatch.chdir(tmp_path)
    again = origin.load()
    assert torch.equal(logits(again), logits(source))
    assert again.preprocessing == Preprocessing([0.5], [0.25], 1.0, "bicubic")
    random = [load_source(f"{models_file}:vit", input_size=SIZE) for _ in range(2)]
    assert torch.equal(logits(random[0]), logits(random[1]))


def run_by_unpickling(path: Path) -> None:
    """A program whose example inputs, when unpickled, run a command."""
    import zipfile

    torch.export.save(exported(nn.Conv2d(3, 2, 16).eval()), path / "good.pt2")
    with zipfile.ZipFile(path / "good.pt2") as good, zipfile.ZipFile(path / "m.pt2", "w") as bad:
        for name in good.namelist():
            content = good.read(name)
            if name.endswith("sample_inputs/model.pt"):
                torch.save(Code(), path / "code.pt")
                content = (path / "code.pt").read_bytes()
            bad.writestr(name, content)


def a_name_that_is_no_text(path: Path) -> None:
    with zipfile.ZipFile(path / "m.pt2", "w") as archive:
        archive.writestr("é", "")
    (path / "m.pt2").write_bytes((path / "m.pt2").read_bytes().replace("é".encode(), b"\xed0"))


def half_a_program(path: Path) -> None:
    torch.export.save(exported(nn.Conv2d(3, 2, 16).eval()), path / "m.pt2")
    whole = (path / "m.pt2").read_bytes()
    (path / "m.pt2").write_bytes(whole[: len(whole) // 2])


def converted_without_report(path: Path) -> None:
    (path / "out").mkdir()
    torch.export.save(exported(nn.Conv2d(3, 2, 16).eval()), path / "out" / "model.pt2")


def converted_as_if(**source: Any) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        converted_without_report(path)
        (path / "out" / "report.json").write_text(json.dumps({"source": {"spec": "timm:vit", **source}}))

    return write


def python(text: str) -> Callable[[Path], object]:
    return lambda path: (path / "m.py").write_text(text)


def nothing(path: Path) -> None:
    pass


BAD_SOURCES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "absent file": ("m.pt2", nothing, r"cannot read the exported program m\.pt2: No such file"),
    "not a program": ("m.pt2", lambda path: (path / "m.pt2").write_text("x"), "m.pt2 is truncated or is not"),
    "half a program": ("m.pt2", half_a_program, "m.pt2 is truncated or is not"),
    "a name that is no text": ("m.pt2", a_name_that_is_no_text, "m.pt2 is damaged .*codec can't decode.*: save it"),
    "a program that runs code": ("m.pt2", run_by_unpickling, "m.pt2 could not be read as an exported program"),
    "onnx": ("m.onnx", lambda path: (path / "m.onnx").write_text("x"), "not an ONNX model, or cut short"),
    "a checkpoint": ("w.pth", nothing, "w.pth holds weights, not a model"),
    "an address": ("https://x.org/m.pt2", nothing, "download the file first"),
    "a folder of something": (".", nothing, "is not a converted model, as it holds no model.pt2"),
    "a transformers folder": (".", lambda path: (path / "config.json").touch(), r"is given as hf:\."),
    "a folder without report": ("out", converted_without_report, "report.json is missing or damaged"),
    "a folder whose pictures have no size": ("out", converted_as_if(crop=1e9), "report.json is missing or damaged"),
    "a folder of an unknown filter": ("out", converted_as_if(interpolation="x"), "report.json is missing or damaged"),
    "an unknown library": ("tim:vit", nothing, "unknown kind of model 'tim': did you mean 'timm'"),
    "no such thing": ("vit", nothing, "no model 'vit': give"),
    "a name left out": ("timm:", nothing, "timm: needs a name"),
    "an unknown timm model": ("timm:vit_tiny_patch16_22", nothing, "did you mean 'vit_tiny_patch16_224'.* more$"),
    "an unknown torchvision model": ("torchvision:vit_b_15", nothing, "did you mean 'vit_b_16'"),
    "hf without network": ("hf:nobody/nothing", nothing, "hf:nobody/nothing could not be loaded"),
    "hf without config": ("hf:.", nothing, "the folder has no config.json"),
    "no factory": ("m.py", python("def vit(): pass"), r"as m\.py:NAME; it defines vit"),
    "an unknown factory": ("m.py:vti", python("def vit(): pass"), "unknown factory in m.py 'vti': did you mean 'vit'"),
    "not Python": ("m.py:vit", python("def vit(:"), "m.py is not a Python file"),
    "a failing file": (
        "m.py:vit",
        python("import nosuch\n"),
        r"ModuleNotFoundError: No module named 'nosuch' \(line 1\)",
    ),
    "a failing factory": ("m.py:vit", python("\ndef vit(): 1 / 0"), r"m.py:vit raised ZeroDivisionError: .*\(line 2\)"),
    "not a module": ("m.py:vit", python("def vit(): return 'vit'"), "returns an nn.Module, not a str"),
    "an absent Python file": ("m.py:vit", nothing, "cannot read the Python file m.py"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    spec, make, message = BAD_SOURCES[case]
    if (library := spec.partition(":")[0]) in ("timm", "torchvision") and spec != "timm:":
        import_torchvision()
        pytest.importorskip(library, reason=f"needs {library}")
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        load_source(spec, input_size=SIZE)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_bad_inputs_of_a_good_model(models_file: Path, trained: nn.Module) -> None:
    spec = f"{models_file}:vit"
    for arguments, message in (
        ({}, "size of its input is not known: give --input-size"),
        (
            {"input_size": "1x16x16"},
            r"vit does not take an input of 1x16x16 \(.*channels.*\): give another --input-size",
        ),
        ({"input_size": "3x4x4"}, "vit does not take an input of 3x4x4"),
        ({"input_size": SIZE, "mean": 0}, "--mean without --std"),
        ({"input_size": SIZE, "checkpoint": "pretrained"}, "has no published weights"),
    ):
        with pytest.raises(InputError, match=message):
            load_source(spec, **arguments)  # type: ignore[arg-type]
    program = exported(trained)
    with pytest.raises(InputError, match="was exported for images of 3x16x16, not 3x8x8"):
        load_source(program, input_size="3x8x8")
    with pytest.raises(InputError, match="takes no --checkpoint"):
        load_source(program, checkpoint="w.pt")
    with pytest.raises(InputError, match="a int is not a model"):
        load_source(3)  # type: ignore[arg-type]


class Half(nn.Module):
    def forward(self, tokens: Tensor, scale: Tensor) -> Tensor:
        return nn.functional.one_hot(tokens, 3) * scale


def test_inputs_made_for_a_program_are_of_its_types() -> None:
    program = torch.export.export(Half(), (torch.ones(2, 4, dtype=torch.int64), torch.ones(3, dtype=torch.float16)))
    program._example_inputs = None  # as of a file that was saved without them
    made = load_source(program).example_inputs
    assert [(tensor.dtype, list(tensor.shape)) for tensor in made] == [(torch.int64, [2, 4]), (torch.float16, [3])]


def test_timm_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import_torchvision()
    pytest.importorskip("timm", reason="needs timm")
    source = load_source("timm:vit_tiny_patch16_224")
    assert "random weights" in caplog.text
    assert source.input_size == (3, 224, 224)
    assert source.preprocessing == Preprocessing((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 0.9, "bicubic")
    assert source.origin is not None
    assert source.model is not None
    assert torch.equal(source.model.head.weight, source.origin.load().model.head.weight)  # type: ignore[union-attr]
    small = load_source("timm:vit_tiny_patch16_224", input_size="1x32x48")
    assert small.model is not None
    torch.save(small.model.state_dict(), tmp_path / "w.pt")
    with pytest.raises(InputError, match=r"2 of another shape \(pos_embed is 1x7x192 in the file"):
        load_source("timm:vit_tiny_patch16_224", checkpoint=tmp_path / "w.pt")
    caplog.clear()
    load_source("timm:vit_tiny_patch16_224", checkpoint=tmp_path / "w.pt", input_size="1x32x48")
    assert not caplog.text


def test_torchvision_by_name() -> None:
    import_torchvision()
    pytest.importorskip("torchvision", reason="needs torchvision")
    source = load_source("torchvision:vit_b_32", input_size="3x64x64")
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    assert source.preprocessing == Preprocessing(mean, std, 0.875, "bilinear")
    assert source.input_size == (3, 64, 64)


def test_a_transformers_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    import_torchvision()  # which transformers would import as it is
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8
    )
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    said = {"image_mean": [0.5], "image_std": [0.25], "rescale_factor": 2 / 255, "do_center_crop": True, "resample": 2}
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 16, "width": 16}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said | sizes))
    source = load_source(f"hf:{tmp_path}")
    assert torch.equal(logits(source), model(X).logits.detach())
    assert source.labels is None  # its configuration has but numbers for its classes
    assert source.input_size == (3, 16, 16)
    assert source.preprocessing == Preprocessing((0.25,), (0.125,), 0.5, "bilinear")
    assert not caplog.text

    (tmp_path / "preprocessor_config.json").unlink()
    assert load_source(f"hf:{tmp_path}").preprocessing is None
    transformers.ViTModel(config).save_pretrained(tmp_path)
    features = load_source(f"hf:{tmp_path}")
    assert features.labels is None
    assert [list(each.shape) for each in logits(features)] == [[2, 5, 16], [2, 16]]

    config.architectures, config.id2label = ["ViTForImageClassification"], dict(enumerate("abcdefg"))
    config.save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match=r"its weights do not fit its configuration: 2 missing \(classifier.bias, class"
    ):
        load_source(f"hf:{tmp_path}")
    (tmp_path / "model.safetensors").unlink()
    named = load_source(f"hf:{tmp_path}")
    assert logits(named).shape == (2, 7)
    assert named.labels == named.origin.labels == tuple("abcdefg")
    assert "random weights" in caplog.text


def test_torchvision_is_imported_where_its_compiled_operators_do_not_load(tmp_path: Path) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torchvision.models\nimport torch\ntorch.library.register_fake('torchvision::nms')(len)\n"
    )
    (package / "models.py").write_text("")
    code = (
        "from attnrewrite.frontends.torchvision import import_torchvision as get\n"
        "import sys; first = get(); assert first is get() is sys.modules['torchvision']; print(first.__file__)"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert printed.stdout.strip() == str(package / "__init__.py")
