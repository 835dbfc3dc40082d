"""Operators written out in others: the pass that does it, and those that some compiler reads wrongly or not at all.

TVM's importer drops attention's explicit scale in silence, refuses masks of bool, other ranks than 2 and 4 and grouped
queries, makes a gather of a select, and can fill neither a mask nor an integer tensor; its schedules for GPUs add to a
product over a single element what is added to it once more; coremltools takes every gelu for the exact one, makes
twenty gathers of a roll, and has no alias, no where on numbers, no bicubic resize, no sliding windows, no scatter
between types and no one_hot of int64, and misreads resizes by other than whole factors. Shapes are fixed by then, so
that a tensor like another is a constant.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import ExportedProgram

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.fx.history import forget_history
from attnrewrite.passes.fx.resampling import RESIZES, by_strides, resized_unless_whole, summed_windows, windows
from attnrewrite.passes.fx.signature import other_signature, writes_in_place

aten = torch.ops.aten


@dataclass(frozen=True)
class Decompose(Pass[ExportedProgram]):
    """The operators of `table` written out as its functions say, and none left that writes in place.

    A function that returns NotImplemented leaves its operator as it is.
    """

    table: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)

    def rewrite(self, graph: ExportedProgram) -> PassResult[ExportedProgram]:
        if not self.table and graph.dialect == "ATEN":  # which says that it was decomposed
            return PassResult(graph)
        program = forget_history(graph.run_decompositions(dict(self.table)))
        before, after = _operators(graph), _operators(program)
        gone = tuple(Edit(str(operator)) for operator in (before - after).elements())
        relabelled = () if graph.dialect == program.dialect else (Edit(graph.dialect, program.dialect),)
        return PassResult(program, gone + relabelled)

    def ensures(self, before: ExportedProgram, result: PassResult[ExportedProgram]) -> Refusal | None:
        """The same inputs and outputs, and no operator that writes in place."""
        return other_signature(before, result.graph) or writes_in_place(result.graph)


def own_decompositions(operators: Iterable[Any]) -> dict[Any, Callable[..., Any]]:
    """What torch itself writes `operators` out in; those that it does not write out are left out."""
    wanted = [each for each in operators if isinstance(each, torch._ops.OpOverload)]
    composite = torch.export.default_decompositions()
    found: dict[Any, Callable[..., Any]] = torch._decomp.get_decompositions(wanted)
    return found | {each: composite[each] for each in wanted if each in composite}


def _operators(program: ExportedProgram) -> Counter[Any]:
    return Counter(node.target for node in program.graph.nodes if node.op == "call_function")


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
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed, barred = (
            torch.full((), added, dtype=scores.dtype, device=scores.device) for added in (0.0, -torch.inf)
        )
        attn_mask = torch.where(attn_mask, allowed, barred)
    if attn_mask is not None:
        # A sum, as most masks are constants: what is added is then one, too. It is made in the scores' own type.
        scores = scores + attn_mask.to(scores.dtype)
    return torch.softmax(scores, -1) @ value


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return _roll(x.flatten(), shifts, (0,)).view(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        start = -shift % x.shape[dim]
        x = torch.cat([x.narrow(dim, start, x.shape[dim] - start), x.narrow(dim, 0, start)], dim)
    return x


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: str = "valid",
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    if padding == "same":
        overlap = [reach * (size - 1) for reach, size in zip(dilation, weight.shape[2:], strict=True)]
        # The odd one goes to the end, as in torch.
        pairs = [(total // 2, total - total // 2) for total in reversed(overlap)]
        x = F.pad(x, [amount for pair in pairs for amount in pair])
    return F.conv2d(x, weight, bias, tuple(stride), 0, tuple(dilation), groups)


def _full_like(x: Tensor, value: float, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return _new_full(x, x.shape, value, dtype)


def _new_full(x: Tensor, size: Sequence[int], value: float, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.full(tuple(size), value, dtype=dtype or x.dtype, device=x.device)


def _alias(x: Tensor) -> Tensor:
    return x


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return NotImplemented
    return 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x * x * x)))


def _where(condition: Tensor, one: Tensor | float, other: Tensor | float) -> Tensor:
    dtype = torch.result_type(one, other)
    # Filled, not literal: torch 2.13 loses track of tensors that a decomposition brings along.
    one, other = (
        value.to(dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=condition.device)
        for value in (one, other)
    )
    return torch.where(condition, one, other)


def _product(left: Tensor, right: Tensor) -> Tensor:
    return left * right if min(left.dim(), right.dim()) > 1 and left.shape[-1] == 1 else NotImplemented


def _one_hot(places: Tensor, classes: int = -1) -> Tensor:
    if classes < 0:
        return NotImplemented
    return (places.unsqueeze(-1) == torch.arange(classes, device=places.device)).to(torch.int64)


def _variance_and_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    axes = None if dim is None else list(dim)
    variance = torch.var(x, axes, correction=1 if correction is None else correction, keepdim=keepdim)
    return variance, torch.mean(x, axes, keepdim=keepdim)


def _select(x: Tensor, dim: int, index: int) -> Tensor:
    return x.narrow(dim, index % x.shape[dim], 1).squeeze(dim)


def _select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    return _slice_scatter(x, source.unsqueeze(dim), dim, index % x.shape[dim], index % x.shape[dim] + 1)


def _slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    if step != 1:
        return NotImplemented
    first, last, _ = slice(start, end).indices(x.shape[dim])
    parts = [x.narrow(dim, 0, first), source.to(x.dtype), x.narrow(dim, last, x.shape[dim] - last)]
    return torch.cat([part for part in parts if part.shape[dim]], dim)


def _bicubic(
    x: Tensor, output_size: Sequence[int] | None, align_corners: bool, scale_factors: Sequence[float] | None = None
) -> Tensor:
    if output_size is None:
        assert scale_factors is not None
        output_size = [int(size * factor) for size, factor in zip(x.shape[2:], scale_factors, strict=True)]
    steps = [None if scale_factors is None else 1 / factor for factor in scale_factors or (1.0, 1.0)]
    rows, columns = (
        _cubic_weights(x, given, made, align_corners, step)
        for given, made, step in zip(x.shape[2:], output_size, steps, strict=True)
    )
    return rows @ x @ columns.T


def _cubic_weights(x: Tensor, given: int, made: int, align_corners: bool, step: float | None) -> Tensor:
    """What each of `made` places takes of each of `given` ones: Keys' kernel, a = -0.75, edges repeated."""
    places = torch.arange(made, dtype=x.dtype, device=x.device)
    if align_corners:
        places = places * ((given - 1) / (made - 1) if made > 1 else 0.0)
    else:
        places = (places + 0.5) * (given / made if step is None else step) - 0.5
    left = places.floor()
    numbers = torch.arange(given, dtype=x.dtype, device=x.device)
    weights = torch.zeros((made, given), dtype=x.dtype, device=x.device)
    for neighbour in (-1, 0, 1, 2):
        distance = (places - left - neighbour).abs()
        near = (1.25 * distance - 2.25) * distance * distance + 1
        far = ((-0.75 * distance + 3.75) * distance - 6) * distance + 3
        weight = near if neighbour in (0, 1) else far
        taken = (left + neighbour).clamp(0, given - 1)
        weights = weights + weight[:, None] * (taken[:, None] == numbers).to(x.dtype)
    return weights


# what compilers are not given
WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.roll.default: _roll,
    aten.one_hot.default: _one_hot,
    aten.alias.default: _alias,
    aten.as_strided.default: by_strides,
    aten.col2im.default: summed_windows,
    aten.unfold.default: windows,
    **{each: resized_unless_whole(each) for each in RESIZES},
    aten.bmm.default: _product,
    aten.conv2d.padding: _convolution,
    aten.full_like.default: _full_like,
    aten.gelu.default: _gelu,
    aten.matmul.default: _product,
    aten.masked_fill.Scalar: lambda x, mask, value: _where(mask, value, x),
    aten.new_full.default: _new_full,
    aten.new_ones.default: lambda x, size, **options: _new_full(x, size, 1, options.get("dtype")),
    aten.new_zeros.default: lambda x, size, **options: _new_full(x, size, 0, options.get("dtype")),
    aten.ones_like.default: lambda x, **options: _full_like(x, 1, options.get("dtype")),
    aten.select.int: _select,
    aten.select_scatter.default: _select_scatter,
    aten.slice_scatter.default: _slice_scatter,
    aten.upsample_bicubic2d.vec: _bicubic,
    aten.zeros_like.default: lambda x, **options: _full_like(x, 0, options.get("dtype")),
    aten.var_mean.correction: _variance_and_mean,
    aten.where.Scalar: _where,
    aten.where.ScalarOther: _where,
    aten.where.ScalarSelf: _where,
}
