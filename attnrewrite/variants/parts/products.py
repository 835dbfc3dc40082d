"""The product all linear attention shares: query (key^T value), in whichever order is cheaper."""

from typing import Literal

from torch import Tensor

from attnrewrite.variants.parts.key_masks import weighed
from attnrewrite.variants.parts.tensors import as_type, safe, wide

Order = Literal["auto", "qk", "kv"]


def product_multiplies(queries: int, keys: int, features: int, channels: int, order: Order) -> int:
    """Multiply-adds of query [queries, features], key [keys, features], value [keys, channels] in `order`."""
    if order == "qk":
        return queries * keys * (features + channels)
    if order == "kv":
        return (queries + keys) * features * channels
    return min(product_multiplies(queries, keys, features, channels, "qk"), (queries + keys) * features * channels)


def cheaper_order(queries: int, keys: int, features: int, channels: int) -> Order:
    """The order with fewer multiplies: (query key^T) value when tokens are few, else query (key^T value)."""
    pairs = product_multiplies(queries, keys, features, channels, "qk")
    return "qk" if pairs < product_multiplies(queries, keys, features, channels, "kv") else "kv"


def mean_product(query: Tensor, key: Tensor, value: Tensor, order: Order) -> Tensor:
    """query (key^T value) / M for query [B, H, N, f], key [B, H, M, f], value [B, H, M, e] -> [B, H, N, e].

    The division is shared out, so that no sum over tokens overflows in half precision. `auto` decides from the
    shapes at hand, call by call; an export that leaves the tokens open gets the linear order, which suits any number.
    """
    if order == "auto":
        sizes = query.shape[2], key.shape[2], key.shape[3], value.shape[3]
        order = cheaper_order(*sizes) if all(isinstance(size, int) for size in sizes) else "kv"
    share = key.shape[2] ** -0.5
    if order == "qk":
        return (query @ key.transpose(2, 3)) @ (value * share) * share
    return query @ (key.transpose(2, 3) @ (value * share) * share)


def kernel_attention(
    query: Tensor, key: Tensor, value: Tensor, epsilon: float, order: Order, weights: Tensor | None = None
) -> Tensor:
    """Weights phi(q) . phi(k), normalised over the keys: phi(q) [phi(k)^T v] / phi(q) . sum_j phi(k_j).

    `query` and `key` are the features, non-negative; `epsilon` is the least that the mean weight of a row may be.
    `weights` are those of the keys (key_weights).
    Half precision is left to the values that come and go: products of features have a wider range than it.
    """
    query, key = wide(query), weighed(wide(key), weights)
    weight = query @ key.mean(2, keepdim=True).transpose(2, 3)
    total = mean_product(query, key, wide(value), order)
    return as_type(total / weight.clamp(min=safe(epsilon, weight.dtype)), value.dtype)
