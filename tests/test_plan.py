"""Plans: saved, read, applied again to the bit, and refused where they do not fit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_vits import Encoder

import attnrewrite as ar
from attnrewrite.errors import InputError
from attnrewrite.frontends.capture import capture
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.plan import PLAN_FILE, WEIGHTS_FILE, Plan


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[ar.Conversion, Path]:
    torch.manual_seed(0)
    done = ar.convert(Encoder(), (torch.randn(2, 3, 16, 16),), variant="l1", calibration=torch.randn(96, 3, 16, 16))
    return done, done.save(tmp_path_factory.mktemp("plans") / "encoder")


def fresh(seed: int = 0) -> torch.fx.GraphModule:
    torch.manual_seed(seed)
    return capture("encoder", Encoder().eval(), (torch.randn(2, 3, 16, 16),)).module


def test_a_saved_plan_applied_to_a_fresh_copy_gives_the_same_bits(converted: tuple[ar.Conversion, Path]) -> None:
    done, folder = converted
    again = FxRewrite(Plan.load(folder))(fresh())
    x = torch.randn(5, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(again(x), done.module(x))
        assert not torch.equal(again(x), fresh()(x))


def test_a_plan_for_another_model_names_the_first_site_that_differs(converted: tuple[ar.Conversion, Path]) -> None:
    with pytest.raises(InputError, match=r"site0 \(.*\) has fingerprint .* apply the plan to the model"):
        FxRewrite(Plan.load(converted[1]))(fresh(seed=1))


def test_a_plan_for_a_deeper_model_names_the_missing_site(converted: tuple[ar.Conversion, Path]) -> None:
    torch.manual_seed(0)
    model = Encoder().eval()
    model.blocks.layers = model.blocks.layers[:1]
    shallow = capture("shallow", model, (torch.randn(2, 3, 16, 16),)).module
    with pytest.raises(InputError, match=r"site1 .* is missing, the model has 1 sites"):
        FxRewrite(Plan.load(converted[1]))(shallow)


PLACED = """{"version": 1, "model": "m", "placements": [{"site": "site0", "name": "a", "variant": "l1", "options": {},
    "heads": 2, "head_dim": 8, "n_queries": 4, "n_keys": 4, "fingerprint": "q8x16:1.5,-2e-05;o8x16:1.5,-2e-05"}]}"""


def test_a_fingerprint_is_read_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / PLAN_FILE).write_text(PLACED)
    with pytest.raises(InputError, match=rf"{WEIGHTS_FILE}.* cannot be read"):  # which is what comes next
        Plan.load(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (PLAN_FILE, "{", "not a plan of this version"),
        (PLAN_FILE, '{"version": 2, "model": "m", "placements": []}', "not a plan of this version"),
        (PLAN_FILE, PLACED.replace("8x16:1.5,-2e-05", "8x16"), "not a plan of this version"),
        (PLAN_FILE, PLACED.replace("1.5,-2e-05", "1.5\\u007f2"), "not a plan of this version"),
        (PLAN_FILE, None, "cannot be read"),
        (WEIGHTS_FILE, "nothing like safetensors", "cannot be read as safetensors"),
        (WEIGHTS_FILE, None, "cannot be read as safetensors"),
    ],
)
def test_a_damaged_plan_is_one_clear_line(
    converted: tuple[ar.Conversion, Path], tmp_path: Path, file: str, content: str | None, words: str
) -> None:
    for name in (PLAN_FILE, WEIGHTS_FILE):
        (tmp_path / name).write_bytes((converted[1] / name).read_bytes())
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        Plan.load(tmp_path)
    assert str(tmp_path / file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_variant_in_a_plan_is_an_error_with_the_nearest_name(
    converted: tuple[ar.Conversion, Path], tmp_path: Path
) -> None:
    for name in (PLAN_FILE, WEIGHTS_FILE):
        (tmp_path / name).write_bytes((converted[1] / name).read_bytes())
    document = json.loads((tmp_path / PLAN_FILE).read_text())
    document["placements"][0]["variant"] = "l11"
    (tmp_path / PLAN_FILE).write_text(json.dumps(document))
    with pytest.raises(InputError, match="did you mean 'l1'"):
        Plan.load(tmp_path)


def test_a_plan_of_version_0_1_0_loads(tmp_path: Path) -> None:
    """It called the maps of query and key `recut`, and kept no checksum of the weights."""
    torch.manual_seed(0)
    done = ar.convert(Encoder(), (torch.randn(2, 3, 16, 16),), variant="relu-linear")
    done.plan.save(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    old = {name.replace(".qk_maps.", ".recut."): tensor for name, tensor in tensors.items()}
    assert old.keys() != tensors.keys()
    save_file(old, tmp_path / WEIGHTS_FILE)
    document = json.loads((tmp_path / PLAN_FILE).read_text())
    del document["weights_sha256"]
    (tmp_path / PLAN_FILE).write_text(json.dumps(document))
    x = torch.randn(5, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(FxRewrite(Plan.load(tmp_path))(fresh())(x), done.module(x))


def test_other_weights_than_those_it_was_saved_with_are_refused(
    converted: tuple[ar.Conversion, Path], tmp_path: Path
) -> None:
    (tmp_path / PLAN_FILE).write_bytes((converted[1] / PLAN_FILE).read_bytes())
    tensors = load_file(converted[1] / WEIGHTS_FILE)
    changed = next(iter(tensors))
    save_file(tensors | {changed: tensors[changed] + 1}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(InputError, match=r"not the weights that plan\.json was saved with; convert again") as caught:
        Plan.load(tmp_path)
    assert str(tmp_path / WEIGHTS_FILE) in str(caught.value)
