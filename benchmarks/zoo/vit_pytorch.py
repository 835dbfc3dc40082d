"""vit-pytorch: research spellings, most of them with einops. `target` is module:class."""

from importlib import import_module
from typing import Any

from torch import nn

from attnrewrite.frontends.torchvision import import_torchvision
from zoo import Recipe

SMALL = {"num_classes": 5, "dim": 48, "depth": 2, "heads": 3, "dim_head": 16, "mlp_dim": 64}
VIT = {"image_size": 64, "patch_size": 16, **SMALL}
IMAGE = (3, 64, 64)
VIDEO = (3, 4, 32, 32)


def without(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in names}


TABLE = {
    "cait": Recipe("cait:CaiT", IMAGE, {**VIT, "cls_depth": 1}),
    "cct": Recipe(
        "cct:CCT",
        (3, 32, 32),
        {"img_size": 32, "embedding_dim": 48, "num_layers": 2, "num_heads": 3, "mlp_ratio": 2.0, "num_classes": 5},
    ),
    "cross_vit": Recipe(
        "cross_vit:CrossViT",
        (3, 48, 48),
        {
            "image_size": 48,
            "num_classes": 5,
            "sm_dim": 32,
            "lg_dim": 48,
            "lg_enc_depth": 1,
            "depth": 2,
            "sm_enc_heads": 2,
            "sm_enc_mlp_dim": 64,
            "lg_enc_heads": 2,
            "lg_enc_mlp_dim": 64,
            "cross_attn_heads": 2,
        },
    ),
    "cvt": Recipe(
        "cvt:CvT",
        IMAGE,
        {
            "num_classes": 5,
            "s1_emb_dim": 16,
            "s2_emb_dim": 32,
            "s3_emb_dim": 48,
            "s2_heads": 2,
            "s3_heads": 3,
            "s2_depth": 1,
            "s3_depth": 1,
        },
    ),
    "deepvit": Recipe("deepvit:DeepViT", IMAGE, VIT),
    "pit": Recipe("pit:PiT", IMAGE, {**VIT, "depth": (1, 1), "patch_size": 8}),
    "regionvit": Recipe(
        "regionvit:RegionViT", (3, 224, 224), {"dim": (16, 32, 48, 64), "depth": (1, 1, 1, 1), "num_classes": 5}
    ),
    "max_vit_registers": Recipe(
        "max_vit_with_registers:MaxViT",
        (3, 112, 112),
        {"num_classes": 5, "dim": 32, "dim_conv_stem": 16, "dim_head": 16, "depth": (1, 1), "window_size": 7},
    ),
    "nest": Recipe(
        "nest:NesT",
        IMAGE,
        {
            "image_size": 64,
            "patch_size": 4,
            "dim": 32,
            "heads": 2,
            "num_hierarchies": 2,
            "block_repeats": (1, 1),
            "num_classes": 5,
        },
    ),
    "scalable_vit": Recipe(
        "scalable_vit:ScalableViT",
        (3, 64, 64),
        {
            "num_classes": 5,
            "dim": 16,
            "heads": (1, 2),
            "depth": (1, 1),
            "reduction_factor": (4, 2),
            "window_size": (8, 8),
            "ff_expansion_factor": 2,
        },
    ),
    "flash": Recipe("simple_flash_attn_vit:SimpleViT", IMAGE, VIT),
    "fft": Recipe("simple_vit_with_fft:SimpleViT", IMAGE, {**VIT, "freq_patch_size": 8}),
    "hyper_connections": Recipe(
        "simple_vit_with_hyper_connections:SimpleViT", IMAGE, {**VIT, "num_residual_streams": 2}
    ),
    "one_dimension": Recipe("vit_1d:ViT", (3, 64), {"seq_len": 64, "patch_size": 8, **SMALL}),
    "vit_5": Recipe("vit_5:ViT", IMAGE, VIT),
    "detection_pool": Recipe("vit_detpool:ViTDetPool", IMAGE, VIT),
    "jumbo": Recipe("jumbo_vit:JumboViT", IMAGE, {**VIT, "jumbo_cls_k": 2}),
    "jet": Recipe("jet_vit:JetViT", IMAGE, VIT),
    "looped": Recipe(
        "looped_vit:LoopedViT",
        IMAGE,
        {**without(VIT, "depth"), "pre_loop_depth": 1, "num_looped_blocks": 1, "post_loop_depth": 1, "loop_depth": 2},
    ),
    "slots": Recipe("wwt:WWT", IMAGE, {**VIT, "num_slots": 4}),
    "xcit": Recipe("xcit:XCiT", IMAGE, {**VIT, "cls_depth": 1}),
    "small_dataset": Recipe("vit_for_small_dataset:ViT", IMAGE, VIT),
    "video_factorised": Recipe(
        "vivit:ViViT",
        VIDEO,
        {
            "image_size": 32,
            "image_patch_size": 16,
            "frames": 4,
            "frame_patch_size": 2,
            **without(SMALL, "depth"),
            "spatial_depth": 1,
            "temporal_depth": 1,
            "use_flash_attn": False,
        },
    ),
    "relative_projected": Recipe("simple_vit_with_relative_proj_pos_bias:SimpleViT", IMAGE, VIT),
    "depth_attention": Recipe("simple_vit_attn_residual:SimpleViTAttnResidual", IMAGE, VIT),
    "dca": Recipe("attn_residual_with_dca_simple_vit:SimpleViT", IMAGE, VIT),
    "sparse_gating": Recipe("simple_vit_with_sparse_gating:SimpleViTWithSparseGating", IMAGE, VIT),
}


def make(recipe: Recipe) -> nn.Module:
    import_torchvision()
    module, name = recipe.target.split(":")
    model: nn.Module = getattr(import_module(f"vit_pytorch.{module}"), name)(**recipe.arguments)
    return model
