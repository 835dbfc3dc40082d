"""torchvision: nn.MultiheadAttention, shifted windows in two and three dimensions, and networks without attention.

`target` is module:class or module:function under torchvision.models.
"""

from importlib import import_module
from typing import Any

from torch import nn

from attnrewrite.frontends.torchvision import import_torchvision
from zoo import Recipe

STAGES: dict[str, Any] = {"embed_dim": 24, "depths": [2, 2], "num_heads": [2, 3], "num_classes": 5}
IMAGE = (3, 64, 64)

TABLE = {
    "vit": Recipe(
        "vision_transformer:VisionTransformer",
        IMAGE,
        {"image_size": 64, "patch_size": 16, "num_layers": 2, "num_heads": 3, "hidden_dim": 48, "mlp_dim": 64},
    ),
    "swin": Recipe("swin_transformer:SwinTransformer", IMAGE, {"patch_size": [4, 4], "window_size": [4, 4], **STAGES}),
    "swin_padded": Recipe(
        "swin_transformer:SwinTransformer", (3, 72, 72), {"patch_size": [4, 4], "window_size": [5, 5], **STAGES}
    ),
    "swin_video": Recipe(
        "video.swin_transformer:SwinTransformer3d",
        (3, 8, 64, 64),
        {"patch_size": [2, 4, 4], "window_size": [2, 4, 4], **STAGES},
    ),
    "maxvit": Recipe(
        "maxvit:MaxVit",
        (3, 64, 64),
        {
            "input_size": (64, 64),
            "stem_channels": 16,
            "partition_size": 4,
            "block_channels": [16, 32],
            "block_layers": [1, 1],
            "head_dim": 16,
            "stochastic_depth_prob": 0.0,
            "num_classes": 5,
        },
    ),
    "resnext": Recipe("resnet:resnext50_32x4d", IMAGE),
    "efficientnet": Recipe("efficientnet:efficientnet_b0", IMAGE),
    "regnet": Recipe("regnet:regnet_y_400mf", IMAGE),
    "squeezenet": Recipe("squeezenet:squeezenet1_1", IMAGE),
}


def make(recipe: Recipe) -> nn.Module:
    import_torchvision()
    module, name = recipe.target.split(":")
    model: nn.Module = getattr(import_module(f"torchvision.models.{module}"), name)(**recipe.arguments)
    return model
