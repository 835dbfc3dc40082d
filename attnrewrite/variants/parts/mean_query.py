"""What stands for all queries of a head: their mean, by which forms of one score for each key weigh the keys."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from attnrewrite.variants.parts.form import Heads


def mean_query(batches: Iterable[Heads]) -> Tensor:
    """The mean over images and tokens, [H, d] in float64."""
    total, count = torch.zeros(1, dtype=torch.float64), 0
    for heads in batches:
        total = total.to(heads.query.device) + heads.query.double().sum((0, 2))
        count += heads.query.shape[0] * heads.query.shape[2]
    return total / count


def shares_of(parts: int, channels: int, heads: int) -> Tensor:
    """[parts, heads]: of so many channels in equal parts, which share of each part belongs to each head."""
    channel = torch.arange(channels)
    own = F.one_hot(channel // (channels // parts)).double()
    return own.T @ F.one_hot(channel // (channels // heads)).double() * (parts / channels)
