"""transformers: encoders, detectors and video models. `target` is model:configuration."""

import inspect
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnrewrite.frontends.torchvision import import_torchvision
from zoo import Recipe

SMALL: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 64}
VIT = {"image_size": 64, "patch_size": 16, **SMALL}
VIDEO = {**VIT, "image_size": 32, "num_frames": 4, "tubelet_size": 2}
DETECTOR: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10,
}  # fmt: skip
IMAGE = (3, 64, 64)
GIVEN_AS = ("pixel_values", "pixel_values_videos", "inputs", "inputs_embeds")

TABLE = {
    "dinov2": Recipe("Dinov2Model:Dinov2Config", IMAGE, {**VIT, "use_swiglu_ffn": True}),
    "dinov2_registers": Recipe("Dinov2WithRegistersModel:Dinov2WithRegistersConfig", IMAGE, VIT),
    "dinov3": Recipe("DINOv3ViTModel:DINOv3ViTConfig", IMAGE, {**VIT, "num_register_tokens": 2}),
    "siglip": Recipe("SiglipVisionModel:SiglipVisionConfig", IMAGE, VIT),
    "videomae": Recipe("VideoMAEModel:VideoMAEConfig", (4, 3, 32, 32), VIDEO),
    "vjepa2": Recipe(
        "VJEPA2Model:VJEPA2Config",
        (4, 3, 32, 32),
        {
            **VIDEO,
            "crop_size": 32,
            "frames_per_clip": 4,
            "mlp_ratio": 2,
            "pred_hidden_size": 48,
            "pred_num_attention_heads": 3,
            "pred_num_hidden_layers": 1,
        },
    ),
    "vivit": Recipe("VivitModel:VivitConfig", (4, 3, 32, 32), {**VIDEO, "tubelet_size": [2, 16, 16]}),
    "timesformer": Recipe("TimesformerModel:TimesformerConfig", (4, 3, 32, 32), VIDEO),
    "beit": Recipe("BeitModel:BeitConfig", IMAGE, {**VIT, "use_relative_position_bias": True}),
    "yolos": Recipe("YolosModel:YolosConfig", IMAGE, {**VIT, "image_size": [64, 64], "num_detection_tokens": 5}),
    "mobilevit": Recipe("MobileViTModel:MobileViTConfig", IMAGE, {"hidden_sizes": [24, 32, 40]}),
    "mobilevit_separable": Recipe("MobileViTV2Model:MobileViTV2Config", IMAGE, {"width_multiplier": 0.5}),
    "cvt": Recipe("CvtModel:CvtConfig", IMAGE, {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 3], "depth": [1, 2, 3]}),
    "segment_anything": Recipe(
        "SamVisionModel:SamVisionConfig",
        (3, 128, 128),
        {
            "image_size": 128,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "mlp_dim": 64,
            "window_size": 5,
            "global_attn_indexes": [1],
            "output_channels": 16,
        },
    ),
    "segment_anything_3": Recipe(
        "Sam3ViTModel:Sam3ViTConfig",
        (3, 112, 112),
        {
            **SMALL,
            "image_size": 112,
            "patch_size": 14,
            "window_size": 4,
            "global_attn_indexes": [1],
            "pretrain_image_size": 56,
        },
    ),
    "intern": Recipe(
        "InternVLVisionModel:InternVLVisionConfig",
        IMAGE,
        {**VIT, "image_size": [64, 64], "patch_size": [16, 16], "use_qk_norm": True},
    ),
    "aimv2": Recipe("Aimv2VisionModel:Aimv2VisionConfig", IMAGE, VIT),
    "llama4": Recipe(
        "Llama4VisionModel:Llama4VisionConfig",
        IMAGE,
        {
            **VIT,
            "intermediate_size": 192,
            "vision_output_dim": 48,
            "projector_input_dim": 48,
            "projector_output_dim": 48,
        },
    ),
    "prism": Recipe(
        "VideoPrismVisionModel:VideoPrismVisionConfig",
        (4, 3, 32, 32),
        {**VIDEO, "tubelet_size": [1, 16, 16], "num_spatial_layers": 1, "num_temporal_layers": 1},
    ),
    "hiera": Recipe(
        "HieraModel:HieraConfig",
        (3, 64, 64),
        {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 2, 1], "num_heads": [1, 1, 2, 4]},
    ),
    "swin_super_resolution": Recipe(
        "Swin2SRModel:Swin2SRConfig",
        (3, 32, 32),
        {"image_size": 32, "embed_dim": 24, "depths": [2], "num_heads": [3], "window_size": 8},
    ),
    "perceiver": Recipe(
        "PerceiverModel:PerceiverConfig",
        (50, 32),
        {
            "num_latents": 8,
            "d_latents": 48,
            "d_model": 32,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 3,
            "num_cross_attention_heads": 2,
        },
    ),
    "conditional_detr": Recipe("ConditionalDetrModel:ConditionalDetrConfig", IMAGE, DETECTOR),
    "deformable_detr": Recipe("DeformableDetrModel:DeformableDetrConfig", IMAGE, {**DETECTOR, "num_feature_levels": 2}),
    "mixture_of_experts": Recipe(
        "MixtralModel:MixtralConfig",
        (16, 48),
        {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 32},
    ),
    "grouped_query": Recipe(
        "Qwen3Model:Qwen3Config",
        (16, 48),
        {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 32},
    ),
    "regnet": Recipe(
        "RegNetModel:RegNetConfig", IMAGE, {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "groups_width": 8}
    ),
}


class Called(nn.Module):
    """A transformers model as a function of one tensor: pictures, or what its embedding would have made."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        taken = inspect.signature(model.forward).parameters
        self.name = next(name for name in GIVEN_AS if name in taken)

    def forward(self, given: Tensor) -> tuple[Tensor, ...]:
        out = self.model(**{self.name: given}, return_dict=True)
        return tuple(value for value in pytree.tree_leaves(out.to_tuple()) if isinstance(value, Tensor))


def make(recipe: Recipe) -> nn.Module:
    import_torchvision()
    import transformers

    transformers.logging.set_verbosity_error()
    name, configuration = recipe.target.split(":")
    config = getattr(transformers, configuration)(**recipe.arguments)
    if hasattr(config, "backbone_config"):
        stages = ["stage3", "stage4"] if "num_feature_levels" in recipe.arguments else ["stage4"]
        small: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
        small |= {"layer_type": "basic", "out_features": stages}
        config.backbone_config = transformers.ResNetConfig(**small)
    config._attn_implementation = "eager"
    return Called(getattr(transformers, name)(config))
