"""Core ML's operators that look up, place, sort and count by index. Called as those of arithmetic are."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# What MIL's modes of scattering are for torch's scatter_reduce; a difference is a sum of what is negated, a quotient a
# product of what is inverted.
_REDUCTIONS = {"add": "sum", "sub": "sum", "mul": "prod", "div": "prod", "max": "amax", "min": "amin"}


def gather(
    x: Tensor, indices: Tensor, axis: Tensor, batch_dims: Tensor, validate_indices: Tensor | None = None
) -> Tensor:
    shared, dim = int(batch_dims), int(axis) % x.dim()
    if shared:
        fewer = torch.tensor(dim - 1), torch.tensor(shared - 1)
        return torch.stack([gather(one, places, *fewer) for one, places in zip(x, indices, strict=True)])
    rows = x.index_select(dim, indices.long().reshape(-1) % x.shape[dim])
    return rows.reshape(x.shape[:dim] + indices.shape + x.shape[dim + 1 :])


def gather_along_axis(x: Tensor, indices: Tensor, axis: Tensor, validate_indices: Tensor | None = None) -> Tensor:
    dim = int(axis) % x.dim()
    return x.gather(dim, indices.long() % x.shape[dim])


def gather_nd(x: Tensor, indices: Tensor, batch_dims: Tensor, validate_indices: Tensor | None = None) -> Tensor:
    if int(batch_dims):
        fewer = batch_dims - 1
        return torch.stack([gather_nd(one, places, fewer) for one, places in zip(x, indices, strict=True)])
    return x[tuple(indices.long().unbind(-1))]


def scatter(
    data: Tensor, indices: Tensor, updates: Tensor, axis: Tensor, mode: str, validate_indices: Tensor | None = None
) -> Tensor:
    dim = int(axis) % data.dim()
    shape = [1] * data.dim()
    shape[dim] = len(indices)
    return _scattered(data, dim, indices.long().reshape(shape).expand_as(updates), updates, mode)


def scatter_along_axis(
    data: Tensor, indices: Tensor, updates: Tensor, axis: Tensor, mode: str, validate_indices: Tensor | None = None
) -> Tensor:
    return _scattered(data, int(axis) % data.dim(), indices.long(), updates, mode)


def scatter_nd(
    data: Tensor, indices: Tensor, updates: Tensor, mode: str, validate_indices: Tensor | None = None
) -> Tensor:
    sizes = data.shape[: indices.shape[-1]]
    strides = torch.tensor([math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))])
    rows = ((indices.long() % torch.tensor(sizes)) * strides).sum(-1).reshape(-1)
    flat = data.reshape(math.prod(sizes), -1)
    given = updates.reshape(len(rows), -1)
    return _scattered(flat, 0, rows[:, None].expand_as(given), given, mode).reshape(data.shape)


def _scattered(data: Tensor, dim: int, places: Tensor, updates: Tensor, mode: str) -> Tensor:
    places = places % data.shape[dim]
    if mode == "update":
        return data.scatter(dim, places, updates)
    given = {"sub": lambda: -updates, "div": lambda: 1 / updates}.get(mode, lambda: updates)()
    return data.scatter_reduce(dim, places, given, _REDUCTIONS[mode])


def topk(
    x: Tensor,
    k: Tensor,
    axis: Tensor,
    ascending: Tensor,
    sort: Tensor | None = None,
    return_indices: Tensor | None = None,
    output_indices_dtype: str | None = None,
) -> Any:
    count = x.shape[int(axis)] if int(k) == -1 else int(k)
    values, places = x.topk(count, int(axis), largest=not bool(ascending))
    return values if return_indices is not None and not bool(return_indices) else (values, places)


def argsort(x: Tensor, axis: Tensor, ascending: Tensor) -> Tensor:
    return x.argsort(dim=int(axis), descending=not bool(ascending), stable=True)


def one_hot(
    indices: Tensor,
    one_hot_vector_size: Tensor,
    axis: Tensor,
    on_value: Tensor | None = None,
    off_value: Tensor | None = None,
) -> Tensor:
    marked = F.one_hot(indices.long(), int(one_hot_vector_size)).movedim(-1, int(axis)).bool()
    on, off = (torch.tensor(default) if value is None else value for value, default in ((on_value, 1), (off_value, 0)))
    return torch.where(marked, on, off)


def cumsum(x: Tensor, axis: Tensor, exclusive: Tensor, reverse: Tensor) -> Tensor:
    dim = int(axis)
    given = x.flip(dim) if bool(reverse) else x
    sums = given.cumsum(dim) - given if bool(exclusive) else given.cumsum(dim)
    return sums.flip(dim) if bool(reverse) else sums


def classify(probabilities: Tensor, classes: list[str]) -> tuple[Tensor, Tensor]:
    """The place of the best class, and what every class has, in their order."""
    flat = probabilities.reshape(-1)
    return flat.argmax(), flat


_FUNCTIONS = (
    gather,
    gather_along_axis,
    gather_nd,
    scatter,
    scatter_along_axis,
    scatter_nd,
    topk,
    argsort,
    one_hot,
    cumsum,
    classify,
)

OPERATORS: dict[str, Callable[..., Any]] = {function.__name__: function for function in _FUNCTIONS}
