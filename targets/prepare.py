"""A module made ready for a compiler: exported for fixed shapes, its operators in spellings that compilers read."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from attnrewrite.errors import InputError


def specialise(module: nn.Module, example_inputs: tuple[Tensor, ...]) -> ExportedProgram:
    """`module` exported for exactly the shapes of `example_inputs`, whatever dimensions it had been dynamic in.

    InputError where torch.export cannot capture it.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # The fused encoder-layer operator of nn.TransformerEncoder is one that no importer knows.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return torch.export.export(module, example_inputs)
    except Exception as error:
        raise InputError(f"torch.export cannot capture the module for these inputs: {first_line(error)}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def canonical(program: ExportedProgram) -> ExportedProgram:
    """The program without in-place operators, and with those written out that compilers read wrongly or not at all.

    TVM's importer drops attention's explicit scale in silence, refuses masks of bool, other ranks than 2 and 4 and
    grouped queries, and makes a gather of a select; coremltools takes every gelu for the exact one, makes twenty
    gathers of a roll, and has no alias and no where on numbers. All other operators stay whole.
    """
    return program.run_decompositions(_WRITTEN_OUT)


def arrays(values: object) -> tuple[np.ndarray, ...]:
    """The tensors and arrays inside `values` (a tensor, a tuple, a dictionary, a model's output record), in order."""
    leaves = tree_leaves(values)
    tensors = (leaf.detach().cpu().numpy() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return tuple(leaf for leaf in tensors if isinstance(leaf, np.ndarray))


def reference(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[np.ndarray, ...]:
    """What the module itself gives for `inputs`."""
    with torch.inference_mode():
        return arrays(module(*inputs))


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says something, for messages of one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (heads.repeat_interleave(groups, -3) for heads in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-1, -2)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        keep = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if keep else scores + attn_mask
    return torch.softmax(scores, -1) @ value


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return _roll(x.flatten(), shifts, (0,)).view(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        start = -shift % x.shape[dim]
        x = torch.cat([x.narrow(dim, start, x.shape[dim] - start), x.narrow(dim, 0, start)], dim)
    return x


def _alias(x: Tensor) -> Tensor:
    return x


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return NotImplemented
    return 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _where(condition: Tensor, one: Tensor | float, other: Tensor | float) -> Tensor:
    like = one if isinstance(one, Tensor) else other
    dtype = like.dtype if isinstance(like, Tensor) else torch.get_default_dtype()
    one, other = (torch.as_tensor(value, dtype=dtype, device=condition.device) for value in (one, other))
    return torch.where(condition, one, other)


def _select(x: Tensor, dim: int, index: int) -> Tensor:
    return x.narrow(dim, index % x.shape[dim], 1).squeeze(dim)


_WRITTEN_OUT: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
    torch.ops.aten.roll.default: _roll,
    torch.ops.aten.alias.default: _alias,
    torch.ops.aten.gelu.default: _gelu,
    torch.ops.aten.select.int: _select,
    torch.ops.aten.where.Scalar: _where,
    torch.ops.aten.where.ScalarOther: _where,
    torch.ops.aten.where.ScalarSelf: _where,
}
