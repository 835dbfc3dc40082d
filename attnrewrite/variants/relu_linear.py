"""Kernel attention with a fixed feature map: ReLU (EfficientViT) and elu + 1."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Form, Heads, received
from attnrewrite.variants.ends import Ends
from attnrewrite.variants.kernel import Order, cheaper_order, kernel_attention, product_multiplies
from attnrewrite.variants.key_weights import key_weights
from attnrewrite.variants.layout import score_scale
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.recut import AsCut, Recut, recut_multiplies, signed_pairs

EPSILON = 1e-6  # a row whose features are all zero stays zero


class KernelForm(Form):
    """phi(q) [phi(k)^T v] / (phi(q) . sum_j phi(k_j)) on the re-cut query and key.

    Calibration re-cuts them into the leading coordinates of the scores with both signs, `gain` times.
    """

    gain = 1.0

    def __init__(self, heads: int, head_dim: int, scale: float, order: Order) -> None:
        super().__init__()
        self.scale = scale
        self.order = order
        self.recut = Recut(heads, head_dim)

    def feature_map(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        query, key = self.recut(query, key)
        features = self.feature_map(query), self.feature_map(key)
        return kernel_attention(*features, value, EPSILON, self.order, key_weights(bias))

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        return received(self, heads)

    def ends(self) -> Ends | None:
        if isinstance(self.recut, AsCut):
            return None
        form = copy.deepcopy(self)
        form.recut = AsCut()
        return Ends(form, self.recut.query.shape[0], *self.recut.taken_out())

    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        self.recut.fit(activations(), self.scale, lambda maps: signed_pairs(maps, maps.shape[2], self.gain))


class ReluForm(KernelForm):
    """phi is the ReLU: no exponential, and no scale, which cancels."""

    def feature_map(self, x: Tensor) -> Tensor:
        return F.relu(x)


class EluForm(KernelForm):
    """phi(x) = elu(x) + 1, which is positive everywhere."""

    gain = 2.0  # of 1, 2: what explains more of softmax's output on a trained ViT

    def feature_map(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1


class FixedFeatures(LinearVariant):
    """A kernel form whose features are as many as the head has channels."""

    kernel: ClassVar[type[KernelForm]]
    no_key_bias = None

    def form(self, site: AttentionSite) -> Form:
        order = cheaper_order(site.n_queries, site.n_keys, site.head_dim, site.value_dim)
        return self.kernel(site.heads, site.head_dim, score_scale(site), order)

    def form_multiplies(self, site: AttentionSite) -> int:
        product = product_multiplies(site.n_queries, site.n_keys, site.head_dim, site.value_dim, "auto")
        normaliser = (site.n_queries + site.n_keys) * site.head_dim
        return site.heads * (product + normaliser + recut_multiplies(site.n_queries, site.n_keys, site.head_dim))


@dataclass(frozen=True, kw_only=True)
class ReluLinear(FixedFeatures):
    name = "relu-linear"
    summary = "ReLU linear attention, with a depthwise 3x3 branch where local=true"
    source = "Cai et al. 2023, EfficientViT, equation 2"
    kernel = ReluForm


@dataclass(frozen=True, kw_only=True)
class Elu(FixedFeatures):
    name = "elu"
    summary = "linear attention with the feature map elu(x) + 1"
    source = "Katharopoulos et al. 2020, Transformers are RNNs, equations 4-7"
    kernel = EluForm
