"""Kernel attention with a fixed feature map: ReLU (EfficientViT) and elu + 1."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from attnrewrite.site import AttentionSite
from attnrewrite.variants.base import Form
from attnrewrite.variants.kernel import Order, cheaper_order, kernel_attention, product_multiplies
from attnrewrite.variants.linear import LinearVariant

EPSILON = 1e-6  # a row whose features are all zero stays zero


class ReluForm(Form):
    """relu(q) [relu(k)^T v] / (relu(q) . sum_j relu(k_j)): the scale cancels."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernel_attention(F.relu(query), F.relu(key), value, EPSILON, self.order)


class EluForm(Form):
    """The same with elu(x) + 1, which is positive everywhere."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernel_attention(F.elu(query) + 1, F.elu(key) + 1, value, EPSILON, self.order)


class FixedFeatures(LinearVariant):
    """A kernel form whose features are as many as the head has channels."""

    def form_multiplies(self, site: AttentionSite) -> int:
        sizes = site.n_queries, site.n_keys, site.head_dim, site.value_dim
        return site.heads * (product_multiplies(*sizes, "auto") + (site.n_queries + site.n_keys) * site.head_dim)

    @staticmethod
    def order(site: AttentionSite) -> Order:
        return cheaper_order(site.n_queries, site.n_keys, site.head_dim, site.value_dim)


@dataclass(frozen=True, kw_only=True)
class ReluLinear(FixedFeatures):
    name = "relu-linear"
    summary = "ReLU linear attention, with a depthwise 3x3 branch where local=true"
    source = "Cai et al. 2023, EfficientViT, equation 2"

    def form(self, site: AttentionSite) -> Form:
        return ReluForm(self.order(site))


@dataclass(frozen=True, kw_only=True)
class Elu(FixedFeatures):
    name = "elu"
    summary = "linear attention with the feature map elu(x) + 1"
    source = "Katharopoulos et al. 2020, Transformers are RNNs, equations 4-7"

    def form(self, site: AttentionSite) -> Form:
        return EluForm(self.order(site))
