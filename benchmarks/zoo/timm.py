"""timm: the widest choice of vision attention, and of what only looks like it.

`target` is a name of its registry, or module:class.
"""

from importlib import import_module
from typing import Any

from torch import nn

from attnrewrite.frontends.torchvision import import_torchvision
from zoo import Recipe

VIT: dict[str, Any] = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3}
IMAGE = (3, 64, 64)

TABLE = {
    # one softmax over all tokens
    "vit_registers": Recipe("vit_small_patch14_reg4_dinov2", (3, 56, 56), {**VIT, "img_size": 56}),
    "vit_attention_pool": Recipe("vit_base_patch16_siglip_224", IMAGE, VIT),
    "vit_shared_relative": Recipe("vit_srelpos_small_patch16_224", IMAGE, VIT),
    "vit_rope_mixed": Recipe("vit_small_patch16_rope_mixed_224", IMAGE, VIT),
    "vit_perception": Recipe("vit_pe_core_tiny_patch16_384", IMAGE, VIT),
    "eva02": Recipe("eva02_tiny_patch14_224", (3, 56, 56), {**VIT, "img_size": 56}),
    "naflex_map": Recipe("naflexvit_base_patch16_map", IMAGE, {"depth": 2, "embed_dim": 48, "num_heads": 3}),
    "deepseek": Recipe("deepseek_vit_412m", (3, 56, 56), {"depth": 2, "embed_dim": 48, "num_heads": 3}),
    "qwen3": Recipe("qwen3_vit_88m", IMAGE, {"depth": 2, "embed_dim": 48, "num_heads": 3}),
    "gemma4": Recipe("gemma4_vit_167m", IMAGE, {"depth": 2, "embed_dim": 48, "num_heads": 3, "head_dim": 16}),
    "cait": Recipe("cait_xxs24_224", IMAGE, {**VIT, "depth_token_only": 1}),
    "tnt": Recipe("tnt_s_patch16_224", IMAGE, {"img_size": 64, "depth": 2, "embed_dim": 48, "inner_dim": 24}),
    "crossvit": Recipe(
        "crossvit_9_240", (3, 240, 240), {"embed_dim": [32, 48], "num_heads": [2, 3], "depth": [[1, 2, 0]]}
    ),
    "vitamin": Recipe("vitamin_small_224", IMAGE, {"img_size": 64, "depth": 2}),
    # stages, windows, grids
    "swin_v2": Recipe(
        "swinv2_tiny_window8_256", (3, 256, 256), {"embed_dim": 24, "depths": (2, 2), "num_heads": (2, 3)}
    ),
    "hiera_segment": Recipe(
        "sam2_hiera_tiny", (3, 128, 128), {"embed_dim": 24, "stages": (1, 2, 3, 1), "global_att_blocks": (4,)}
    ),
    "gc_vit": Recipe(
        "gcvit:GlobalContextVit",
        (3, 224, 224),
        {"embed_dim": 32, "depths": (1, 2, 1, 1), "num_heads": (1, 2, 4, 8), "window_ratio": (32, 32, 16, 32)},
    ),
    "maxxvit": Recipe("maxxvit_rmlp_nano_rw_256", (3, 128, 128), {"img_size": 128}),
    "pvt_v2": Recipe("pvt_v2_b0", IMAGE, {"depths": (1, 1, 1, 1)}),
    "volo": Recipe(
        "volo:VOLO",
        IMAGE,
        {
            "img_size": 64,
            "layers": (1, 1, 1, 1),
            "embed_dims": (24, 48, 48, 48),
            "num_heads": (2, 3, 3, 3),
            "stem_hidden_dim": 16,
        },
    ),
    "caformer": Recipe("caformer_s18", IMAGE),
    # convolutional projections
    "mobilevit": Recipe("mobilevit_xxs", IMAGE),
    "mobilenet_hybrid": Recipe("mobilenetv4_hybrid_medium", IMAGE),
    "shvit": Recipe("shvit_s1", (3, 128, 128)),
    "iformer": Recipe("iformer_t", (3, 128, 128)),
    "cpubone": Recipe("cpubone_nano", (3, 128, 128)),
    "levit_wide": Recipe("levit_256d", (3, 224, 224), {"depth": (1, 1, 1)}),
    "botnet": Recipe("botnet26t_256", (3, 128, 128), {"img_size": 128}),
    "halo_lambda_bottleneck": Recipe("lamhalobotnet50ts_256", (3, 128, 128), {"img_size": 128}),
    "efficientformer": Recipe("efficientformerv2_s1", (3, 224, 224), {"depths": (1, 1, 2, 2)}),
    # over channels
    "xcit_small_patch": Recipe(
        "xcit_nano_12_p8_224", IMAGE, {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3}
    ),
    "davit": Recipe("davit_small", (3, 112, 112), {"depths": (1, 1), "embed_dims": (24, 48), "num_heads": (2, 3)}),
    "edgenext": Recipe("edgenext_x_small", (3, 128, 128), {"depths": (1, 2, 2, 2)}),
    "coat": Recipe("coat_lite_mini", IMAGE, {"img_size": 64, "serial_depths": (1, 1, 1, 1)}),
    # no softmax(q k^T) v
    "mobilevit_separable": Recipe("mobilevitv2_050", IMAGE),
    "efficientvit_linear": Recipe("efficientvit_b0", IMAGE),
    "swiftformer": Recipe("swiftformer_xs", IMAGE, {"layers": (1, 1, 1, 1)}),
    "global_context": Recipe("gcresnext26ts", IMAGE),
    "bilinear_attention": Recipe("bat_resnext26ts", (3, 256, 256)),
    "split_attention": Recipe("resnest26d", IMAGE),
    "selective_kernel": Recipe("skresnet18", IMAGE),
    "sequencer": Recipe("sequencer2d_s", IMAGE, {"img_size": 64, "layers": (1, 1, 1, 1)}),
    "resmlp": Recipe("resmlp_12_224", IMAGE, {"img_size": 64}),
    "convnext": Recipe("convnext_atto", IMAGE),
    "pooling": Recipe("poolformerv2_s12", IMAGE),
}


def make(recipe: Recipe) -> nn.Module:
    import_torchvision()
    import timm
    from timm.layers import set_fused_attn

    set_fused_attn(False)
    module, _, name = recipe.target.rpartition(":")
    model: nn.Module = (
        getattr(import_module(f"timm.models.{module}"), name)(**recipe.arguments)
        if module
        else timm.create_model(recipe.target, pretrained=False, **recipe.arguments)
    )
    return model
