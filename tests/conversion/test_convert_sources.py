"""Every kind of source converts through the same verb: all sites found, the identity proved, the result runs."""

from pathlib import Path

import pytest
import torch
from tiny_vits import Encoder

import attnrewrite as ar
from attnrewrite.frontends.torchvision import import_torchvision


def hugging_face(folder: Path) -> str:
    import_torchvision()
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder / "vit")
    return f"hf:{folder / 'vit'}"


def program(folder: Path) -> str:
    x = torch.randn(2, 3, 16, 16)
    open_batch = ({0: torch.export.Dim.AUTO},)
    torch.export.save(torch.export.export(Encoder().eval(), (x,), dynamic_shapes=open_batch), folder / "encoder.pt2")
    return str(folder / "encoder.pt2")


def timm_model(folder: Path) -> str:
    import_torchvision()
    pytest.importorskip("timm", reason="timm is not installed")
    return "timm:vit_tiny_patch16_224"


def torchvision_model(folder: Path) -> str:
    import_torchvision()
    pytest.importorskip("timm", reason="torchvision's models are tested where timm's are")
    return "torchvision:vit_b_32"


@pytest.mark.parametrize(
    ("make", "sites"), [(hugging_face, 2), (program, 2), (timm_model, 12), (torchvision_model, 12)]
)
def test_every_kind_of_source_converts(make, sites: int, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    done = ar.convert(make(tmp_path), variant="l1")
    assert [site["variant"] for site in done.report["sites"]] == ["l1"] * sites
    assert max(site["identity_error"] for site in done.report["sites"]) <= 1e-5
    x = done.example_inputs[0]
    with torch.no_grad():
        assert torch.isfinite(done.module(x.expand(2, *x.shape[1:]))[0]).all()


def test_what_was_converted_converts_again(tmp_path: Path) -> None:
    first = ar.convert(program(tmp_path), variant="l1").save(tmp_path / "first")
    again = ar.convert(first, variant="relu-linear")  # the class token's exact row is what is left to find
    assert [(site["n_queries"], site["variant"]) for site in again.report["sites"]] == [(1, "relu-linear")] * 2
