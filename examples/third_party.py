"""Someone else's checkpoint: a module of our own that fits its state dict, and nothing of the author's code.

    attnrewrite explain examples/third_party.py:cifar10_vit --checkpoint vit_cifar10.pth --input-size 3x32x32

The checkpoint is vit_cifar10.pth of github.com/smmk47/CIFAR10-Classification: a ViT for 32x32 images in patches of 4x4,
whose blocks are PyTorch's own nn.TransformerEncoder. Its images are normalised with mean 0.4914,0.4822,0.4465 and std
0.2023,0.1994,0.2010.
"""

import torch
from torch import Tensor, nn


class PatchEmbedding(nn.Module):
    """[B, 3, H, W] -> [B, tokens, width], one token for each patch."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """[B, 3, 32, 32] -> logits [B, classes]: a class token, learned positions, post-norm blocks, a linear head."""

    def __init__(self, width: int = 128, patch: int = 4, depth: int = 6, heads: int = 8, classes: int = 10) -> None:
        super().__init__()
        tokens = 1 + (32 // patch) ** 2
        self.patch_embed = PatchEmbedding(width, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, width))
        block = nn.TransformerEncoderLayer(width, heads, dim_feedforward=2 * width, dropout=0.1, batch_first=True)
        self.transformer = nn.TransformerEncoder(block, depth)
        self.mlp_head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embed(images)
        tokens = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1)
        return self.mlp_head(self.transformer(tokens + self.pos_embed)[:, 0])


def cifar10_vit() -> nn.Module:
    return VisionTransformer()
