"""Kernel attention, by its feature map: ReLU (EfficientViT), elu + 1, and Hedgehog's softmax of both signs."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Form, Heads, received
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.parts.form import FoldableMaps
from attnrewrite.variants.parts.key_masks import key_weights
from attnrewrite.variants.parts.products import Order, cheaper_order, kernel_attention, product_multiplies
from attnrewrite.variants.parts.qk_maps import NoMaps, QKMaps, qk_map_multiplies, signed_pairs
from attnrewrite.variants.parts.tensors import score_scale

EPSILON = 1e-6  # a row whose features are all zero stays zero


class KernelForm(Form):
    """phi(q) [phi(k)^T v] / (phi(q) . sum_j phi(k_j)) on the re-cut query and key.

    Calibration re-cuts them into the leading coordinates of the scores, `gain` times, as `arranged`.
    """

    gain = 1.0
    epsilon = EPSILON

    def __init__(self, heads: int, head_dim: int, scale: float, order: Order) -> None:
        super().__init__()
        self.scale = scale
        self.order = order
        self.qk_maps = QKMaps(heads, head_dim, self.start(scale))

    def feature_map(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def start(scale: float) -> float:
        """The scale that uncalibrated query and key carry: its sign alone, where its size cancels."""
        return math.copysign(1, scale)

    def arranged(self, maps: Tensor) -> Tensor:
        """Maps [H, d, d] to the leading coordinates, as the features want them: with both signs."""
        return signed_pairs(maps, maps.shape[2], self.gain)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        query, key = self.qk_maps(query, key)
        features = self.feature_map(query), self.feature_map(key)
        return kernel_attention(*features, value, self.epsilon, self.order, key_weights(bias))

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        return received(self, heads)

    def foldable_maps(self) -> FoldableMaps | None:
        if isinstance(self.qk_maps, NoMaps):
            return None
        form = copy.deepcopy(self)
        form.qk_maps = NoMaps()
        return FoldableMaps(form, self.qk_maps.query.shape[0], *self.qk_maps.taken_out())

    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        self.qk_maps.fit(activations(), self.scale, self.arranged)


class ReluForm(KernelForm):
    """phi is the ReLU: no exponential, and no scale, which cancels."""

    def feature_map(self, x: Tensor) -> Tensor:
        return F.relu(x)


class EluForm(KernelForm):
    """phi(x) = elu(x) + 1, which is positive everywhere."""

    gain = 8.0  # of 2, 4, 8: the least divergence after the fit on a trained ViT; larger ones make a ReLU of it

    def feature_map(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1


class HedgehogForm(KernelForm):
    """phi(x) = softmax([W x, -W x]), learned, per head; W starts as the identity times the root of the scale."""

    gain = 2.0  # of 2, 4: the lesser divergence after the fit on a trained ViT
    epsilon = 0.0  # no row is without weight

    def feature_map(self, x: Tensor) -> Tensor:
        return torch.softmax(torch.cat([x, -x], dim=3), dim=3)

    @staticmethod
    def start(scale: float) -> float:
        return scale

    def arranged(self, maps: Tensor) -> Tensor:
        return maps * self.gain


class KernelVariant(LinearVariant):
    """A kernel form with `features_per_channel` features for each channel of a head."""

    kernel: ClassVar[type[KernelForm]]
    features_per_channel: ClassVar[int] = 1
    no_key_bias = None

    def form(self, site: AttentionSite) -> Form:
        order = cheaper_order(site.n_queries, site.n_keys, self._features(site), site.value_dim)
        return self.kernel(site.heads, site.head_dim, score_scale(site), order)

    def value_mean(self, site: AttentionSite) -> tuple[float, float] | None:
        return 1.0, 0.0

    def _features(self, site: AttentionSite) -> int:
        return self.features_per_channel * site.head_dim

    def form_multiplies(self, site: AttentionSite) -> int:
        product = product_multiplies(site.n_queries, site.n_keys, self._features(site), site.value_dim, "auto")
        normaliser = (site.n_queries + site.n_keys) * self._features(site)
        return site.heads * (product + normaliser + qk_map_multiplies(site.n_queries, site.n_keys, site.head_dim))


@dataclass(frozen=True, kw_only=True)
class ReluLinear(KernelVariant):
    name = "relu-linear"
    summary = "ReLU linear attention, with a depthwise 3x3 branch where local=true"
    source = "Cai et al. 2023, EfficientViT, equation 2"
    kernel = ReluForm


@dataclass(frozen=True, kw_only=True)
class Elu(KernelVariant):
    name = "elu"
    summary = "linear attention with the feature map elu(x) + 1"
    source = "Katharopoulos et al. 2020, Transformers are RNNs, equations 4-7"
    kernel = EluForm


@dataclass(frozen=True, kw_only=True)
class Hedgehog(KernelVariant):
    name = "hedgehog"
    summary = "linear attention with learned softmax features, which distillation shapes"
    source = "Zhang et al. 2024, The Hedgehog & the Porcupine, section 4"
    kernel = HedgehogForm
    features_per_channel = 2
