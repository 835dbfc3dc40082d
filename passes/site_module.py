"""The module that stands at a rewritten site: read queries, keys and values, attend, write the result back.

Readers and writers hold the layouts that matching found (and the projections, where those were traced), so that the
attention form between them sees [batch, heads, tokens, channels] whatever the model around it looks like.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.patterns.graph import GraphView
from attnrewrite.patterns.weights import output_weights, projection_weights
from attnrewrite.site import AttentionSite, Core, Layout, Operand, OutputProjection, Projection, Term
from attnrewrite.variants.base import Form
from attnrewrite.variants.parts.foldable import Affine
from attnrewrite.variants.parts.form import FoldableMaps
from attnrewrite.variants.parts.tensors import as_type

Groups = tuple[tuple[int, ...], ...]  # axes of a layout's split view that are read as one


def read(tensor: Tensor, layout: Layout) -> Tensor:
    """A tensor of `layout.shape` as [batch, heads, tokens, channels]."""
    return _gathered(tensor, layout, (layout.batch, layout.heads, layout.tokens, layout.channels))


def write(heads: Tensor, layout: Layout) -> Tensor:
    """[batch, heads, tokens, channels] as a tensor of `layout.shape`: the inverse of `read`."""
    return _scattered(heads, layout, (layout.batch, layout.heads, layout.tokens, layout.channels))


def _without_heads(layout: Layout) -> Groups:
    """[batch, tokens, channels] of a layout whose heads are one."""
    return layout.batch, (*layout.heads, *layout.tokens), layout.channels


def tokens_of(tensor: Tensor, layout: Layout) -> Tensor:
    """A tensor of `layout.shape`, whose heads are one, as [batch, tokens, channels]."""
    return _gathered(tensor, layout, _without_heads(layout))


def _gathered(tensor: Tensor, layout: Layout, groups: Groups) -> Tensor:
    """What moves nothing is left out: every operator is traced, lowered and read by someone."""
    if layout.split != layout.shape:
        tensor = tensor.reshape(layout.split)
    if layout.order != tuple(sorted(layout.order)):
        tensor = tensor.permute(layout.order)
    return tensor if all(len(axes) == 1 for axes in groups) else tensor.reshape([layout.count(axes) for axes in groups])


def _scattered(tensor: Tensor, layout: Layout, groups: Groups) -> Tensor:
    order = layout.order
    if any(len(axes) != 1 for axes in groups):
        tensor = tensor.reshape([layout.split[axis] for axis in order])
    if order != tuple(sorted(order)):
        tensor = tensor.permute(sorted(range(len(order)), key=order.__getitem__))
    return tensor if layout.split == layout.shape else tensor.reshape(layout.shape)


LayoutReader = Callable[
    [Tensor, list[int], Layout], Tensor
]  # reads a tensor that broadcasts to a shape, by a layout of it


def read_all(tensor: Tensor, full: list[int], layout: Layout) -> Tensor:
    """A tensor that joins the scores, as [batch, heads, queries, keys]."""
    return read(tensor.expand(full), layout)


def read_keys(tensor: Tensor, full: list[int], layout: Layout) -> Tensor:
    """A tensor that is the same for all heads and queries, as [batch, 1, 1, keys]: N x M of them are never made."""
    same = (*layout.heads, *layout.tokens)
    if layout.split == layout.shape:  # no axis is split: what is one element long may stay so
        full = [size if axis not in same else -1 for axis, size in enumerate(full)]
        tensor = tensor.reshape((1,) * (len(full) - tensor.dim()) + tensor.shape)
        folded = tensor.expand(full)
    else:
        folded = tensor.expand(full).reshape(layout.split)
    for axis in same:
        folded = folded.narrow(axis, 0, 1)
    folded = folded.permute(layout.order)
    return folded.reshape(layout.count(layout.batch), 1, 1, layout.count(layout.channels))


class Read(nn.Module):
    """A tensor that already is the heads' queries, keys or values."""

    def __init__(self, operand: Operand) -> None:
        super().__init__()
        self.layout = operand.layout

    def forward(self, tensor: Tensor) -> Tensor:
        return read(tensor, self.layout)


class ProjectedRead(nn.Module):
    """Tokens and the projection that makes the heads' queries, keys or values of them, times `factor`."""

    def __init__(self, layout: Layout, weight: Tensor, bias: Tensor | None, heads: int, factor: float = 1.0) -> None:
        super().__init__()
        self.layout = layout
        self.heads = heads
        self.factor = factor
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias) if bias is not None else None

    def forward(self, tensor: Tensor) -> Tensor:
        return self.project(self.tokens(tensor))

    def tokens(self, tensor: Tensor) -> Tensor:
        """[batch, tokens, inputs]."""
        return tokens_of(tensor, self.layout)

    def project(self, tokens: Tensor) -> Tensor:
        """[batch, tokens, inputs] -> [batch, heads, tokens, channels]."""
        projected = F.linear(tokens, self.weight, self.bias)
        projected = projected if self.factor == 1.0 else projected * self.factor
        return projected.unflatten(2, (self.heads, -1)).transpose(1, 2)

    @torch.no_grad()
    def fold(self) -> None:
        """Take the factor into the weights, but not where that would round them once more: in half precision, unless it
        is a power of two.
        """
        if self.weight.dtype in (torch.float16, torch.bfloat16) and abs(math.frexp(self.factor)[0]) != 0.5:
            return
        for own in self.parameters():
            own.mul_(self.factor)
        self.factor = 1.0

    def absorb(self, after: Affine | None, heads: int) -> None:
        """Do what `after` does to the heads as well, and give `heads` of them."""
        self.heads = heads
        if after is not None:
            self.weight, self.bias = _composed(after, Affine(self.weight, self.bias))


class Write(nn.Module):
    """The heads' outputs, where the product with the values wrote them."""

    def __init__(self, operand: Operand) -> None:
        super().__init__()
        self.layout = operand.layout

    def forward(self, heads: Tensor) -> Tensor:
        return write(heads, self.layout)


class ProjectedWrite(nn.Module):
    """The heads' outputs through the output projection W_O, where that wrote its result."""

    def __init__(self, layout: Layout, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.layout = layout
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias) if bias is not None else None

    def forward(self, heads: Tensor) -> Tensor:
        tokens = heads.transpose(1, 2).flatten(2)
        return _scattered(F.linear(tokens, self.weight, self.bias), self.layout, _without_heads(self.layout))

    def absorb(self, before: Affine) -> None:
        """Do what `before` does to the heads' outputs as well."""
        self.weight, self.bias = _composed(Affine(self.weight, self.bias), before)


@torch.no_grad()
def _composed(outer: Affine, inner: Affine) -> tuple[nn.Parameter, nn.Parameter | None]:
    """The weight and bias of outer(inner(x)), multiplied in float64 so that it is rounded once."""
    bias = outer.bias
    if inner.bias is not None:
        moved = outer.weight.double() @ inner.bias.double()
        bias = moved if bias is None else moved + bias
    weight = (outer.weight.double() @ inner.weight.double()).to(outer.weight.dtype)
    return nn.Parameter(weight), None if bias is None else nn.Parameter(bias.to(outer.weight.dtype))


class SiteModule(nn.Module):
    """`form` at a site. The inputs are the tensors of `values`, in that order.

    Submodules: `query`, `key`, `value` (readers), `form`, `output` (writer). The same site rewritten to another form
    has the same values, readers and writer, so that teacher and student can be compared part by part.
    """

    def __init__(
        self, site: AttentionSite, core: Core, parts: dict[str, nn.Module], values: dict[str, str], form: Form
    ) -> None:
        super().__init__()
        self.site_id = site.id
        self.heads = site.heads
        self.core = core
        self.bias_of_keys = site.bias_of_keys
        self.query, self.key, self.value = parts["query"], parts["key"], parts["value"]
        self.form = form
        self.output = parts["output"]
        joined = [core.temperature.value] if core.temperature else []
        joined += [term.operand.value for term in core.terms]
        self.values = tuple(dict.fromkeys([*values.values(), *joined]))
        self.roles = values

    def extra_repr(self) -> str:
        return f"{self.site_id}: {self.heads} heads"

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.output(self.attend(*tensors))

    def attend(self, *tensors: Tensor) -> Tensor:
        """The heads' outputs [batch, heads, tokens, channels], which the output projection reads."""
        return self.form(*self.attend_inputs(*tensors))  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Take factors into the projections, as the module's precision allows."""
        for reader in (self.query, self.key, self.value):
            if isinstance(reader, ProjectedRead):
                reader.fold()

    def deploy(self) -> None:
        """Become what stands in a lowered model: the form as it is deployed, its outer maps in the projections, as
        far as they can hold them.
        """
        self.form = self.form.deploy()
        while (maps := self.form.foldable_maps()) is not None and self._can_hold(maps):
            self._hold(maps)

    def _hold(self, maps: FoldableMaps) -> None:
        self.form, self.heads = maps.form, maps.heads
        for role in ("query", "key", "value"):
            reader = getattr(self, role)
            if isinstance(reader, ProjectedRead):
                reader.absorb(getattr(maps, role), maps.heads)
        if maps.output is not None and isinstance(self.output, ProjectedWrite):
            self.output.absorb(maps.output)

    def _can_hold(self, maps: FoldableMaps) -> bool:
        """Whether the projections that `maps` asks for are the site's own, and wide enough to hold a product of maps.

        A tensor for a temperature stands between projection and form; other heads are every reader's business.
        """
        roles = ("query", "key", "value", "output")
        asked = [role for role in roles if getattr(maps, role) is not None or maps.heads != self.heads]
        held = [getattr(self, role) for role in asked]
        traced = all(isinstance(part, ProjectedRead | ProjectedWrite) for part in held)
        half = any(p.dtype in (torch.float16, torch.bfloat16) for p in self.parameters())  # which rounds it once more
        return traced and not half and self.core.temperature is None

    def attend_inputs(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(query, key, value, bias) as the form receives them."""
        given = dict(zip(self.values, tensors, strict=True))
        read_ones = [getattr(self, role)(given[self.roles[role]]) for role in ("query", "key", "value")]
        follow = self._follows()
        batch = next((t.shape[0] for t, follows in zip(read_ones, follow, strict=True) if follows), None)
        batch = max(t.shape[0] for t in read_ones) if batch is None else batch
        query, key, value = (
            t if follows and t.shape[1] == self.heads else t.expand(batch, self.heads, -1, -1)
            for t, follows in zip(read_ones, follow, strict=True)
        )
        temperature = self.temperature(given, batch, query.dtype)
        query = query if temperature is None else query * temperature
        return query, key, value, self.bias(given, batch, query.dtype)

    def temperature(self, given: dict[str, Tensor], batch: int, dtype: torch.dtype) -> Tensor | None:
        """What multiplies the scores, [batch or 1, heads or 1, 1, 1]; `given` are the inputs by their names."""
        if self.core.temperature is None:
            return None
        return as_type(self._joined(Term(self.core.temperature), given, batch, read_all)[:, :, :1, :1], dtype)

    def _follows(self) -> tuple[bool, ...]:
        """For query, key and value, whether the tensor follows the batch size."""
        return tuple(-1 in getattr(self, role).layout.split for role in ("query", "key", "value"))

    def bias(self, given: dict[str, Tensor], batch: int, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores, as the form receives it; `given` are the inputs by the names in `values`."""
        bias: Tensor | None = None
        for term in self.core.terms:
            joined = self._joined(term, given, batch, read_keys if self.bias_of_keys else read_all)
            bias = joined if bias is None else bias + joined
        return bias if bias is None else as_type(bias, dtype)

    def _joined(self, term: Term, given: dict[str, Tensor], batch: int, reader: LayoutReader) -> Tensor:
        """A tensor that joins the scores, as `reader` reads it; a mask as 0 and -inf, whatever it writes there."""
        tensor, layout = given[term.operand.value], term.operand.layout
        if term.dropped is not None:
            dropped = tensor if term.dropped else ~tensor
            tensor = torch.zeros_like(tensor, dtype=torch.float32).masked_fill(dropped, -math.inf)
        elif tensor.dtype == torch.bool:  # added as numbers
            tensor = tensor.to(torch.float32)
        shared = tensor.dim() == 0 or all(size == 1 for size in tensor.shape)
        if shared:
            return tensor.reshape(1, 1, 1, 1) * term.factor
        images = batch // math.prod(layout.split[axis] for axis in layout.batch if layout.split[axis] != -1)
        rest = math.prod(size for size in layout.shape if size != -1)
        total = images * math.prod(size for size in layout.split if size != -1) if -1 in layout.split else rest
        full = [total // rest if size == -1 else size for size in layout.shape]
        joined = reader(tensor, full, layout)
        return joined if term.factor == 1.0 else joined * term.factor


def build_site(graph: GraphView, site: AttentionSite, form: Form) -> SiteModule:
    """The module for `site` with `form` in it and the model's own weights around it, for `settle` once its precision is
    set. The site must have a core.
    """
    assert site.core is not None, f"{site.id} has no core: refuse it before building"
    parts: dict[str, nn.Module] = {}
    values: dict[str, str] = {}
    for role in ("query", "key", "value"):
        projection, operand = _projection(site, role), getattr(site.core, role)
        if projection is not None and projection.input is not None:
            own = map(_tensor, projection_weights(graph, projection))
            parts[role] = ProjectedRead(projection.input.layout, *own, heads=site.heads, factor=projection.factor)  # type: ignore[arg-type,misc]
            values[role] = projection.input.value
        else:
            parts[role], values[role] = Read(operand), operand.value
    mapped = _output_projection(site)
    if mapped is not None and mapped.output is not None:
        weight, bias = output_weights(graph, mapped)
        parts["output"] = ProjectedWrite(mapped.output.layout, _tensor(weight), _tensor(bias))  # type: ignore[arg-type]
    else:
        parts["output"] = Write(site.core.output)
    return SiteModule(site, site.core, parts, values, form)


def written_value(site: AttentionSite) -> str:
    """The value of the graph that the rewritten site replaces."""
    assert site.core is not None
    mapped = _output_projection(site)
    return site.core.output.value if mapped is None or mapped.output is None else mapped.output.value


def _projection(site: AttentionSite, role: str) -> Projection | None:
    """The projection that the rewritten site computes itself: attention over channels starts from the core."""
    found = getattr(site, role)
    return found if isinstance(found, Projection) and found.direct and site.axis == "token" else None


def _output_projection(site: AttentionSite) -> OutputProjection | None:
    found = site.output
    return found if isinstance(found, OutputProjection) and found.direct and site.axis == "token" else None


def _tensor(array: np.ndarray | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(np.array(array, copy=True))
