"""Small vision transformers to lower in tests, one per way to attend; weights strong enough that attention shows."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE = (1, 3, 16, 16)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    # The scale is not the customary one: whoever drops it shows.
    return F.scaled_dot_product_attention(query, key, value, scale=1.0)


def l1_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key = key - key.mean(-2, keepdim=True)
    query, key = (heads / heads.abs().sum(-2, keepdim=True).clamp(min=1e-12) for heads in (query, key))
    return query @ (key.transpose(-1, -2) @ value) + value.mean(-2, keepdim=True)


def relu_linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key = query.relu(), torch.sigmoid(key)
    sums = query @ (key.transpose(-1, -2) @ torch.cat([value, torch.ones_like(value[..., :1])], -1))
    return sums[..., :-1] / (sums[..., -1:] + 1e-6)


ATTENTION: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "softmax": softmax_attention,
    "l1": l1_attention,
    "relu-linear": relu_linear_attention,
}


class Block(nn.Module):
    """Pre-norm attention with a depthwise branch on the grid tokens, then an MLP: [B, 1 + rows * columns, C]."""

    def __init__(self, width: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.local = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        out = self.attend(*heads.unbind(0)).transpose(1, 2).reshape(batch, tokens, width)
        image = x[:, 1:].transpose(1, 2).reshape(batch, width, 4, -1)
        branch = self.local(image).flatten(2).transpose(1, 2)
        x = x + self.proj(torch.cat([out[:, :1], out[:, 1:] + branch], dim=1))
        return x + self.mlp(self.norm2(x))


class TinyViT(nn.Module):
    """[B, 3, 16, 16] -> [B, 10]: 16 grid tokens and a class token of 32 channels."""

    def __init__(self, attention: str, depth: int = 2, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.prefix = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.Sequential(*(Block(width, ATTENTION[attention]) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.tokens(images)[:, 0])

    def tokens(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.blocks(torch.cat([self.prefix.expand(len(images), -1, -1), tokens], dim=1))


def tiny_vit(attention: str, depth: int = 2) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model in eval mode, and its example inputs."""
    generator = torch.Generator().manual_seed(0)
    model = TinyViT(attention, depth).eval().requires_grad_(False)
    for parameter in model.parameters():
        spread = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3
        parameter.copy_(2 * spread * torch.randn(parameter.shape, generator=generator))
    return model, (torch.randn(IMAGE, generator=generator),)


class Encoder(nn.Module):
    """[B, 3, 16, 16] -> [B, 5]: 16 patches and a class token through two pre-norm blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1))[:, 0])


INPUTS = (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)),)


def encoder() -> nn.Module:
    """An encoder whose attention matters: its output changes visibly when the attention does."""
    torch.manual_seed(0)
    model = Encoder()
    with torch.no_grad():
        for layer in model.blocks.layers:
            layer.self_attn.in_proj_weight.mul_(3)
            layer.self_attn.out_proj.weight.mul_(4)
    return model


IMAGE = (1, 3, 16, 16)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Vit(nn.Module):
    """[B, 3, 16, 16] -> [B, 5]: 16 tokens of 32 channels, blocks of 4 heads."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 5)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(depth))
        self.blocks = nn.ModuleList(Attention() for _ in range(depth))

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image).flatten(2).transpose(1, 2)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x) * 3)
        return self.head(x.mean(1))
