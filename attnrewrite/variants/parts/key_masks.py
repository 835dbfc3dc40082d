"""Masks of padded keys in linear forms: softmax(s + b) weighs key m by exp(b_m), and a sum over keys can do the same.

A form takes every sum and mean over the keys with these weights. They are of mean one, so that a mean over the keys
that are left in is a mean over all keys of what is weighed.
"""

import torch
from torch import Tensor

from attnrewrite.variants.parts.tensors import as_type, wide


def key_weights(bias: Tensor | None) -> Tensor | None:
    """exp(b) over its mean, [B, 1, M, 1], for a bias [B, 1, 1, M] of the keys alone; None for any other.

    Where no key is left in, all weights are zero.
    """
    if bias is None or bias.ndim != 4 or bias.shape[1] != 1 or bias.shape[2] != 1:
        return None
    logarithm = wide(bias).transpose(2, 3)
    least = torch.finfo(logarithm.dtype).min
    weights = torch.exp(logarithm - logarithm.amax(2, keepdim=True).clamp(min=least))
    return weights / weights.mean(2, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def weighed(tokens: Tensor, weights: Tensor | None) -> Tensor:
    """`tokens` [B, H, M, c], each times its weight."""
    return tokens if weights is None else as_type(wide(tokens) * weights, tokens.dtype)


def token_mean(tokens: Tensor, weights: Tensor | None) -> Tensor:
    """The mean over the tokens that are left in, [B, H, 1, c]."""
    if weights is None:
        return tokens.mean(2, keepdim=True)
    return as_type((wide(tokens) * weights).mean(2, keepdim=True), tokens.dtype)


def share(weights: Tensor | None) -> Tensor | float:
    """How many tokens are left in, as a part of all, [B, 1, 1, 1]; a weight below the largest counts for less."""
    return 1.0 if weights is None else weights.amax(2, keepdim=True).clamp(min=1).reciprocal()


def largest_one(weights: Tensor | None) -> Tensor | None:
    """The weights as a sum over tokens takes them: the largest is one, not their mean."""
    return None if weights is None else weights * share(weights)


def centred(tokens: Tensor, weights: Tensor | None = None) -> Tensor:
    """[B, H, N, d] without its mean over the tokens that are left in."""
    whole = wide(tokens)
    return as_type(whole - token_mean(whole, weights), tokens.dtype)
