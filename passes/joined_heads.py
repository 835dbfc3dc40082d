"""The heads of a group as one attention of several heads: what passes put in the place of a loop's softmaxes."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.passes.site_module import Read, SiteModule, tokens_of, write
from attnrewrite.site import AttentionSite, Group, Operand, Projection
from attnrewrite.variants.parts.softmax_rows import SoftmaxForm

ROLES = ("query", "key", "value")


class JoinedHeads(nn.Module):
    """Softmax attention over the heads of all members of a group at once, written where the group joins them.

    The inputs are the tensors of `values`, in that order.

    Projections with weights of their own become one product with all the weights; anything else is read where the
    members read it, and laid side by side.
    """

    def __init__(self, members: Sequence[AttentionSite], group: Group) -> None:
        super().__init__()
        first = members[0].core
        assert first is not None, "members of groups have cores"
        assert isinstance(group.output, Operand), "and this one is no group"
        self.site_id = f"{group.id}_heads"  # not the site's own: a form takes this attention's place under that
        self.output, self.core = group.output, first
        self.heads = len(members) * members[0].heads
        self.merged = {role: projections for role in ROLES if (projections := _mergeable(members, role))}
        self.alone = tuple(map(_alone, members))  # no weights are theirs
        weights = [p for each in self.merged.values() for p in each]
        read = [value for site in self.alone for value in site.values]
        read += [value for p in weights for value in (p.input.value, p.weight, p.bias) if value]  # type: ignore[union-attr]
        self.values = tuple(dict.fromkeys(read))

    def forward(self, *tensors: Tensor) -> Tensor:
        given = dict(zip(self.values, tensors, strict=True))
        read = [site.attend_inputs(*(given[value] for value in site.values)) for site in self.alone]
        *operands, biases = zip(*read, strict=True)
        query, key, value = (
            self._projected(self.merged[role], given) if role in self.merged else torch.cat(apart, 1)
            for role, apart in zip(ROLES, operands, strict=True)
        )
        same = all(site.core.terms == self.core.terms for site in self.alone)
        bias = biases[0] if same else torch.cat(biases, 1)
        scaled = query * self.core.scale  # exporters move a scale of the attention, and plans name what stands where
        heads = F.scaled_dot_product_attention(scaled, key, value, attn_mask=bias, scale=1.0)
        return write(heads, self.output.layout)

    def _projected(self, projections: Sequence[Projection], given: Mapping[str, Tensor]) -> Tensor:
        first = projections[0]
        assert first.input is not None
        weight = torch.cat([_rows(_matrix(given[p.weight], p), p) for p in projections])
        bias = None if first.bias is None else torch.cat([_rows(given[p.bias].reshape(-1), p) for p in projections])  # type: ignore[index]
        made = F.linear(tokens_of(given[first.input.value], first.input.layout), weight, bias)
        made = made if first.factor == 1.0 else made * first.factor
        return made.unflatten(2, (self.heads, -1)).transpose(1, 2)


def _alone(site: AttentionSite) -> SiteModule:
    """The site as its core alone says it."""
    core = site.core
    assert core is not None, "members of groups have cores"
    operands = {role: getattr(core, role) for role in ROLES}
    parts: dict[str, nn.Module] = {role: Read(operand) for role, operand in operands.items()}
    values = {role: operand.value for role, operand in operands.items()}
    return SiteModule(site, core, {**parts, "output": nn.Identity()}, values, SoftmaxForm(core.scale))


def _mergeable(members: Sequence[AttentionSite], role: str) -> tuple[Projection, ...] | None:
    """The members' projections, where they are linear maps of the same tokens by weights of their own."""
    found = [getattr(site, role) for site in members]
    projections = tuple(each for each in found if isinstance(each, Projection))
    first = projections[0]
    apart = len({each.weight for each in projections}) > 1
    alike = all(each.input == first.input and each.factor == first.factor for each in projections)
    whole = all(each.direct and each.normalization is None and _adjacent(each.rows) for each in projections)
    biased = {each.bias is None for each in projections}
    return projections if len(projections) == len(found) and apart and alike and whole and len(biased) == 1 else None


def _adjacent(rows: tuple[int, ...]) -> bool:
    return bool((np.diff(rows) == 1).all())


def _matrix(weight: Tensor, projection: Projection) -> Tensor:
    return weight.transpose(0, 1) if projection.transposed else weight.flatten(1)


def _rows(tensor: Tensor, projection: Projection) -> Tensor:
    rows = projection.rows
    return tensor if len(rows) == tensor.shape[0] else tensor.narrow(0, rows[0], len(rows))
