"""Which heads to mask: the paper's locality rule, and ours by measured output error."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from attnrewrite.variants.parts.form import Heads
from attnrewrite.variants.parts.softmax_rows import with_outputs

MASK_ALL_ABOVE, UNMASK_BELOW = 0.65, 0.35


def heads_by_locality(locality: Callable[..., Tensor], batches: Iterable[Heads]) -> tuple[int, ...]:
    """The paper's search at one layer (MaiT, section 4.3): `locality` gives [B, H] scores of masked heads.

    Head 0 is masked first. Above 0.65 every head is masked, and those that score under 0.35 are unmasked again;
    between, head 0 stays; below 0.35 no head is masked.
    """
    scores = torch.cat([locality(batch.query, batch.key, batch.bias).double().cpu() for batch in batches]).mean(0)
    if scores[0] > MASK_ALL_ABOVE:
        return tuple((scores >= UNMASK_BELOW).nonzero().flatten().tolist())
    return (0,) if scores[0] >= UNMASK_BELOW else ()


def masking_error(mask: Callable[..., Tensor], scale: float, batches: Iterable[Heads]) -> tuple[Tensor, Tensor]:
    """Per head [H]: the squared error that `mask` makes in the output, and the exact one's energy around its mean."""
    error, squares = torch.zeros(2, 1, dtype=torch.float64)
    total, rows = torch.zeros(1, 1, dtype=torch.float64), 0
    for heads, exact in with_outputs(batches, scale):
        error = error + (mask(*heads) - exact).double().square().sum((0, 2, 3)).cpu()
        squares = squares + exact.double().square().sum((0, 2, 3)).cpu()
        total, rows = total + exact.double().sum((0, 2)).cpu(), rows + exact.shape[0] * exact.shape[2]
    return error, squares - total.square().sum(1) / max(rows, 1)


def heads_by_error(
    mask: Callable[..., Tensor], scale: float, batches: Iterable[Heads], tolerance: float
) -> tuple[int, ...]:
    """The heads whose output changes by at most `tolerance` of its energy around the mean."""
    error, energy = masking_error(mask, scale, batches)
    return tuple((error <= tolerance * energy).nonzero().flatten().tolist())


def count_by_error(mask: Callable[..., Tensor], scale: float, batches: Iterable[Heads], count: int) -> tuple[int, ...]:
    """The `count` heads whose output changes least."""
    error, _ = masking_error(mask, scale, batches)
    return tuple(sorted(error.topk(count, largest=False).indices.tolist()))
