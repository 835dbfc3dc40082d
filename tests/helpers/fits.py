"""Small models of every arrangement of a block, and the calibration of one of them, for tests of stages."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from attnrewrite.calibration.stage import StageInput
from attnrewrite.calibration.stages import split
from attnrewrite.frontends.capture import capture
from attnrewrite.images.dataset import Images, load_images
from attnrewrite.images.pool import Pool
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.plan import Placement, Plan
from attnrewrite.site import Scan
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import get_variant

WIDTH, HEADS, SIDE = 8, 2, 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.qkv.weight)  # scores far apart, so that attention matters

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        parts = self.qkv(x).reshape(-1, count, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(*parts.unbind(0))
        return self.proj(out.transpose(1, 2).reshape(-1, count, WIDTH))


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class ConvMlp(nn.Sequential):
    """The same on an image of tokens, by convolutions of one pixel."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(WIDTH, 2 * WIDTH, 1), nn.GELU(), nn.Conv2d(2 * WIDTH, WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        image = x.transpose(1, 2).reshape(-1, WIDTH, SIDE, SIDE)
        return super().forward(image).flatten(2).transpose(1, 2)


class WrittenLayerNorm(nn.LayerNorm):
    """As an exporter writes it for an opset without the operator."""

    def forward(self, x: Tensor) -> Tensor:
        apart = x - x.mean(-1, keepdim=True)
        return apart / (apart.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


class TwiceCentred(nn.LayerNorm):
    """As ConvNeXt's of channels: centred for the variance, and again."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * ((x - mean) / torch.sqrt(variance + self.eps)) + self.bias


class WrittenRmsNorm(nn.RMSNorm):
    """As language models write it, in float32 whatever comes."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1 + self.weight)).type_as(x)


class UnitLength(nn.Module):
    """Each token divided by its length, which `F.normalize` expands."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1.0, 3.0, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.weight


GATED = "gated"  # by what the stream says of the whole image
LAYER_NORM = "a layer norm"
JOINED = "joined"  # with other tokens, as in XCiT's blocks of a class token
NORMS = {
    LAYER_NORM: nn.LayerNorm,
    "a layer norm written out": WrittenLayerNorm,
    "a layer norm centred twice": TwiceCentred,
    "an RMS norm": nn.RMSNorm,
    "an RMS norm written out": WrittenRmsNorm,
    "a unit length": UnitLength,
}


class Block(nn.Module):
    """One block in several arrangements; each has two branches that end in a linear map."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.attention, self.mlp = Attention(), ConvMlp() if kind == "convolutions" else Mlp()
        norm = NORMS.get(kind, nn.LayerNorm)
        self.first, self.second = norm(WIDTH), norm(WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.2, 2.0, WIDTH))
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH) for _ in range(2)])
        if kind == GATED:
            self.gate = nn.Linear(WIDTH, WIDTH)
        if kind == "normalised":
            self.mlp[2] = nn.Linear(2 * WIDTH, WIDTH, bias=False)  # the normalisation has one
        for norm in self.norms:
            norm.weight.data, norm.bias.data = torch.linspace(0.2, 2.0, WIDTH), torch.linspace(-0.2, 0.2, WIDTH)
            norm.running_mean, norm.running_var = torch.linspace(0.2, -0.2, WIDTH), torch.linspace(0.5, 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "post-norm":
            x = self.first(x + self.attention(x))
            return self.second(x + self.mlp(x))
        if self.kind == "parallel":
            return x + self.attention(self.first(x)) + self.mlp(self.second(x))
        if self.kind == "normalised":
            x = x + self.norms[0](self.attention(self.first(x)).flatten(0, 1)).reshape_as(x)
            return x + self.norms[1](self.mlp(self.second(x)).flatten(0, 1)).reshape_as(x)
        if self.kind == GATED:
            gate = torch.sigmoid(self.gate(x.mean(1, keepdim=True)))
            x = x + gate * self.attention(self.first(x))
            return x + self.mlp(self.second(x)) / (1.5 - gate)
        if self.kind == JOINED:
            x = x + torch.cat([self.attention(self.first(x))[:, :20], self.first(x)[:, 20:]], 1) * self.scale
            return x + torch.cat([self.first(x)[:, :3], self.mlp(self.second(x)[:, 3:])], 1)
        if self.kind in NORMS:
            x = x + self.first(self.attention(x))
            return x + self.second(self.mlp(x))
        if self.kind == "windows":
            x = x + self._windows(self.first(x))
            return x + self.mlp(self.second(x))
        x = x + self.scale * self.attention(self.first(x))
        return x + self.mlp(self.second(x)) * self.scale

    def _windows(self, x: Tensor) -> Tensor:
        """Attention in rolled 4x4 windows of the 6x6 grid padded to 8x8."""
        image = F.pad(x.reshape(-1, SIDE, SIDE, WIDTH), (0, 0, 0, 2, 0, 2)).roll((-1, -1), (1, 2))
        folded = image.reshape(-1, 2, 4, 2, 4, WIDTH).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, WIDTH)
        out = self.attention(folded).reshape(-1, 2, 2, 4, 4, WIDTH).permute(0, 1, 3, 2, 4, 5)
        return out.reshape(-1, 8, 8, WIDTH).roll((1, 1), (1, 2))[:, :SIDE, :SIDE].reshape(-1, SIDE * SIDE, WIDTH)


class Model(nn.Module):
    """[B, 3, 12, 12] -> logits [B, 5]: a convolution to 36 tokens, two blocks, a mean and a linear head."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Conv2d(3, WIDTH, 2, 2), nn.Linear(WIDTH, 5)
        self.blocks = nn.Sequential(Block(kind), Block(kind))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x).flatten(2).transpose(1, 2)).mean(1))


KINDS = ("post-norm", "pre-norm", "parallel", "windows", "convolutions", "normalised")
LINEAR = (*KINDS, GATED, JOINED)
NORMED = tuple(NORMS)  # whose branches end in that: to first order, linear maps


def pictures(count: int = 96) -> Images:
    return load_images(torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(1)))


@torch.no_grad()
def error_on_others(given: StageInput) -> float:
    """The mean squared error of the student on pictures that no stage saw."""
    others = torch.randn(1_000, 3, 12, 12, generator=torch.Generator().manual_seed(2))
    return float((given.student(others) - given.teacher(others)).square().mean())


def _captured(kind: str, model: nn.Module) -> tuple[GraphModule, Scan]:
    graph = capture(kind, model, (torch.zeros(1, 3, 12, 12),)).module
    found = scan(FxGraph(graph), kind)
    assert len(found.sites) == 2, found.near_misses
    return graph, found


@cache
def _own(kind: str) -> tuple[GraphModule, Scan]:
    """Captured once: what is rewritten is a copy."""
    return _captured(kind, Model(kind))


def calibration(
    kind: str, variant: Variant, images: Images | None = None, model: nn.Module | None = None
) -> StageInput:
    graph, found = _own(kind) if model is None else _captured(kind, model)
    both = [
        FxRewrite(Plan(kind, tuple(Placement.at(site, each) for site in found.sites)))(graph)
        for each in (get_variant("softmax"), variant)
    ]
    return StageInput(graph, both[0], both[1], *split(Pool(images or pictures(), None, (3, 12, 12), 16)))
