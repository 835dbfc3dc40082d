"""Whole models through the CPU schedules: which rule takes what, why the rest is left, and that the results agree."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_vits import Vit, encoder, tiny_vit
from torch import Tensor, nn

from attnrewrite.cli.main import main
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.targets import agreement as check
from attnrewrite.targets.prepare import reference, specialise
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm import relax_pipeline
from attnrewrite.targets.tvm.importer import import_program
from attnrewrite.targets.tvm.schedules.profile import cores, profile

tvm = pytest.importorskip("tvm")

from attnrewrite.targets.tvm.schedules.rewrite import FALLBACK  # noqa: E402

ATTENTION_OF = {"softmax": "attention", "l1": "reduction", "relu-linear": "matmul"}


def lowered(module: nn.Module, inputs: tuple[Tensor, ...]) -> tvm_compat.Scheduled:
    """The module compiled for this machine, its outputs having agreed with torch's."""
    with torch.no_grad():
        made = tvm_compat.build_for_cpu(import_program(specialise(module.eval(), inputs)), "host")
        check.agree("it", tvm_compat.bind(made.executable, inputs, 2)(), reference(module, inputs), check.FLOAT32)
    return made


def left(made: tvm_compat.Scheduled) -> dict[str, str | None]:
    return {each.operators[0]: each.reason for each in made.operators if each.rule == FALLBACK}


@pytest.mark.parametrize("attention", ATTENTION_OF)
def test_nothing_of_a_vision_transformer_is_left(attention: str) -> None:
    model, inputs = tiny_vit(attention)
    made = lowered(model, inputs)
    assert left(made) == {}
    assert ATTENTION_OF[attention] in {each.rule for each in made.operators}
    assert math.fsum(each.share for each in made.operators) == pytest.approx(1)
    assert sum(each.rule == "attention" for each in made.operators) == (2 if attention == "softmax" else 0)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("model", [encoder, Vit])
def test_other_spellings_and_batches(model: type[nn.Module], batch: int) -> None:
    made = lowered(model(), (torch.randn(batch, 3, 16, 16),))
    assert left(made) == {}
    assert sum(each.rule == "attention" for each in made.operators) == 2


def test_what_no_rule_takes_is_left_to_tvm_and_says_why() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sinh(x).cumsum(-1) + x

    made = lowered(Odd(), (torch.randn(3, 5),))
    assert left(made) == {"sinh": "is sinh, which no rule takes", "cumsum": "is cumsum, which no rule takes"}


def test_numbers_of_whole_tensors_are_left_to_tvm() -> None:
    class Spread(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.var() + x.std()

    made = lowered(Spread(), (torch.randn(1, 4, 8, 8),))
    assert set(left(made)) == {"mean", "multiply", "sqrt", "add"}


def test_probabilities_that_are_read_elsewhere_are_computed() -> None:
    class Seen(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            probabilities = (q @ k.transpose(-1, -2)).softmax(-1)
            return probabilities @ v, probabilities

    made = lowered(Seen(), tuple(torch.randn(1, 2, 9, 8) for _ in range(3)))
    assert sorted(each.rule for each in made.operators) == ["matmul", "matmul", "softmax"]


def test_a_product_whose_arithmetic_reads_it_twice_is_computed_once() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.leaky_relu(self.convolution(x), 0.1) + x

    made = lowered(Block(), (torch.randn(1, 8, 6, 6),))
    assert [each.rule for each in made.operators] == ["convolution"]


def test_deit_tiny() -> None:
    import_torchvision()
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    made = lowered(timm.create_model("deit_tiny_patch16_224", depth=2), (torch.randn(1, 3, 224, 224),))
    assert left(made) == {}
    assert [each.rule for each in made.operators].count("attention") == 2


def test_the_pipeline_compiles_modules_of_others() -> None:
    model, inputs = tiny_vit("softmax", depth=1)
    target = tvm.target.Target(dict(profile("host").target))
    module = import_program(specialise(model, inputs))
    executable = tvm.compile(module, target, relax_pipeline=relax_pipeline("host"))
    found = tvm_compat.bind(executable, inputs, 1)()
    check.agree("it", found, reference(model, inputs), check.FLOAT32)


@pytest.mark.parametrize("core", cores())
def test_every_processor_leaves_registers_for_the_operands_of_a_tile(core: str) -> None:
    processor = profile(core)
    for tile in processor.tiles:
        wide = -(-tile.columns // processor.lanes)
        multipliers = tile.rows if processor.by_lane else 1
        assert tile.rows * wide + wide + multipliers <= processor.registers
    for tile in processor.packed:
        wide = -(-tile.columns // processor.lanes)
        assert tile.rows * wide + wide + tile.rows // processor.lanes <= processor.registers
    assert len({tile.rows for tile in processor.packed}) <= 1
    assert 0 < processor.l1 < processor.l2


def test_lower_explains_and_leaves_a_record(
    models_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [f"{models_file}:vit", "--input-size", "3x16x16", "--target", "host", "--out", str(out)]
    assert main(["lower", *arguments, "--explain", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {each["rule"] for each in printed["operators"]} >= {"attention", "matmul", "convolution", "normalise"}
    record = json.loads((out / "artifact.json").read_text())
    assert record["operators"] == printed["operators"]
    assert record["inputs"] == [{"shape": [1, 3, 16, 16], "dtype": "float32"}]
    assert record["outputs"] == [{"shape": [1, 5], "dtype": "float32"}]
    assert record["schedule"].startswith("attnrewrite CPU schedules for host")
    assert main(["lower", *arguments, "--force", "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "matmul, add, nn.relu" in shown
    assert np.isclose(sum(each["share"] for each in printed["operators"]), 1)
