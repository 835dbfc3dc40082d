"""Vision transformers of the libraries, laid out for the engine: nothing in them breaks a rule."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.targets.coreml import interpreter, package
from attnrewrite.targets.coreml.engine_rules import EngineReport, lint
from attnrewrite.targets.prepare import canonical, specialise

pytest.importorskip("coremltools", reason="coremltools is not installed")

vision = import_torchvision()
DEPTH = 2


def timm_vit(**options: object) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    small = {"img_size": 64, "patch_size": 16, "embed_dim": 64, "depth": DEPTH, "num_heads": 2, "num_classes": 10}
    return VisionTransformer(**{**small, **options})


def timm_parallel() -> nn.Module:
    from timm.models.vision_transformer import ParallelThingsBlock

    return timm_vit(block_fn=ParallelThingsBlock, depth=DEPTH // 2)  # two attentions in a block, summed


def torchvision_vit() -> nn.Module:
    return vision.models.VisionTransformer(64, 16, DEPTH, 2, 64, 128, num_classes=10)


def timm_levit() -> nn.Module:
    from timm.models.levit import Levit

    return Levit(img_size=64, embed_dim=(64,), key_dim=16, depth=(DEPTH,), num_heads=(2,), num_classes=10)


class Pooled(nn.Module):
    """A transformers model's class token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).last_hidden_state[:, 0]


def transformers_vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    shape = {"hidden_size": 64, "num_hidden_layers": DEPTH, "num_attention_heads": 2, "intermediate_size": 128}
    return Pooled(ViTModel(ViTConfig(image_size=64, patch_size=16, **shape)))


def transformers_rms() -> nn.Module:
    from transformers import Aimv2VisionConfig, Aimv2VisionModel

    shape = {"hidden_size": 64, "num_hidden_layers": DEPTH, "num_attention_heads": 2, "intermediate_size": 128}
    return Pooled(Aimv2VisionModel(Aimv2VisionConfig(image_size=64, patch_size=16, use_head=False, **shape)))


def timm_swin() -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(img_size=64, embed_dim=32, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=10)


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "timm": timm_vit,
    "timm, scaled layers and normalised keys": lambda: timm_vit(init_values=1e-5, qk_norm=True),
    "timm, parallel branches": timm_parallel,
    "timm, batch norms behind linear layers": timm_levit,
    "torchvision": torchvision_vit,
    "transformers": transformers_vit,
    "transformers, norms by roots of mean squares": transformers_rms,
}


def report(module: nn.Module, wanted: package.Wanted = package.DEFAULT) -> EngineReport:
    """The float16 package of a model for one picture of 64 x 64, against the rules."""
    program = canonical(specialise(module.eval(), (torch.randn(1, 3, 64, 64),)))
    with tempfile.TemporaryDirectory() as folder, package.quiet():
        return lint(interpreter.load(package.convert(program, Path(folder), "FLOAT16", wanted)))


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_vit_breaks_no_rule(name: str) -> None:
    torch.manual_seed(0)
    assert [each for each in report(PLAIN[name]()).operators if each.broken] == []


def test_a_newer_system_changes_nothing_of_the_layout() -> None:
    """iOS 18 has attention as an operator; written out it breaks no rule, so it is written out there, too."""
    found = {
        minimum: report(timm_vit(), package.Wanted(minimum=minimum)).operators for minimum in package.MINIMUMS
    }  # fmt: skip
    older, newer = ([(each.kind, each.multiply_adds, each.broken) for each in found[it]] for it in package.MINIMUMS)
    assert newer == older
    assert "scaled_dot_product_attention" not in {each.kind for each in found["iOS18"]}


def timm_mobilevit() -> nn.Module:
    from timm.models.mobilevit import MobileVitBlock

    return nn.Sequential(
        nn.Conv2d(3, 16, 4, 4),
        MobileVitBlock(16, out_chs=16, transformer_dim=32, transformer_depth=DEPTH, patch_size=2, num_heads=2),
    )


# For each, how often its tokens are put in another order: what is between is laid out like that.
REORDERED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "windows: into them and back in each block, and two when pictures shrink": (timm_swin, 2 * 4 + 2),
    "patches: into them and back in each stage": (timm_mobilevit, 2),
}


@pytest.mark.parametrize("name", REORDERED)
def test_only_tokens_in_another_order_are_moved(name: str) -> None:
    torch.manual_seed(0)
    build, moves = REORDERED[name]
    found = report(build())
    assert found.leaving() == ()
    assert not {"gather", "gather_nd", "gather_along_axis"} & {each.kind for each in found.operators}
    assert len(found.breaking("transpose")) == moves
