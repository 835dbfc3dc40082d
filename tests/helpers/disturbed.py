"""Attention in spellings that nobody listed, with something done to it on the way: what the matcher is judged on.

A `Recipe` is data: how the attention is written, and one to three `Disturbance`s, each a kind of operation at a place.
What a kind needs (a table, a mask, an order) it takes from the module by shape, the same for the same recipe.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from attnrewrite.passes.verify import known_error

HEADS, DIM, TOKENS, MEMORY, WINDOWS = 2, 4, 6, 5, 2
WIDTH = HEADS * DIM
PLACES = ("input", "query", "key", "value", "keys and values", "scores", "probabilities", "output", "projected")


@dataclass(frozen=True)
class Disturbance:
    """`kind` at `place`: `axes` are those along which what joins varies, `axis` the one that moves, `size` how much."""

    place: str
    kind: str
    axes: tuple[bool, bool, bool]
    axis: int
    size: int


@dataclass(frozen=True)
class Recipe:
    packing: str
    product: str
    layout: str
    scaling: str
    mask: str
    disturbances: tuple[Disturbance, ...]


class Disturbed(nn.Module):
    """x [B, TOKENS, WIDTH] (with windows: WINDOWS times as many), a memory and a mask where the recipe takes them."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.extra: list[Tensor] = []
        self.seen: dict[str, Tensor] = {}  # the attention's own probabilities and values, of the last call
        self.summed: Callable[[Tensor], Tensor] = as_it_is  # what becomes of the attention's sum of values

    def forward(self, x: Tensor, first: Tensor | None = None, second: Tensor | None = None) -> Tensor:
        recipe, self.extra = self.recipe, []
        self.mask = None if recipe.mask == "none" else second if recipe.layout == "cross" else first
        x = self.disturbed("input", x)
        if recipe.layout == "windows":
            x = x.view(-1, WINDOWS, TOKENS, WIDTH).reshape(-1, TOKENS, WIDTH)
        memory = first if recipe.layout == "cross" else x
        query, key, value = self.projected(x, memory)
        query, key, value = (
            self.disturbed(place, part)
            for place, part in (("query", query), ("key", key), ("value", value))
        )  # fmt: skip
        key, value = (self.disturbed("keys and values", part) for part in (key, value))
        out = self.disturbed("output", self.summed(self.attended(query, key, value)))
        out = self.disturbed("projected", self.out(self.merged(out)))
        if recipe.layout == "windows":
            out = out.reshape(-1, WINDOWS * TOKENS, WIDTH)
        return out + torch.stack([each.mean() for each in self.extra]).sum() if self.extra else out

    def projected(self, x: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        packing = self.recipe.packing
        if self.recipe.layout in ("cross", "class row") or packing in ("separate", "shared"):
            query = x[:, :1] if self.recipe.layout == "class row" else x
            key = self.maps[1](memory)
            parts = (self.maps[0](query), key, key if packing == "shared" else self.maps[2](memory))
            return tuple(self.split(part) for part in parts)
        packed = self.packed(x)
        if packing == "chunk":
            return tuple(self.split(part) for part in packed.chunk(3, dim=-1))
        if packing == "unbind":
            parts = packed.reshape(-1, TOKENS, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(0)
        else:  # interleaved
            parts = packed.view(-1, TOKENS, HEADS, 3, DIM).transpose(1, 2).unbind(3)
        return tuple(part.reshape(-1, TOKENS, DIM) for part in parts) if self.recipe.product == "bmm" else tuple(parts)

    def split(self, t: Tensor) -> Tensor:
        t = t.view(t.shape[0], -1, HEADS, DIM).transpose(1, 2)
        return t.reshape(-1, t.shape[2], DIM) if self.recipe.product == "bmm" else t

    def merged(self, t: Tensor) -> Tensor:
        t = t.reshape(-1, HEADS, t.shape[-2], DIM)
        return t.transpose(1, 2).flatten(2)

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        recipe, scale = self.recipe, DIM**-0.5
        if recipe.product == "sdpa":
            self.seen = {"value": value} | self.told(query, key)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=self.joined(query, key))
        query = query * scale if recipe.scaling == "before" else query
        if recipe.product == "einsum":
            scores = torch.einsum("bhnd,bhmd->bhnm", query, key)
        elif recipe.product == "bmm":
            scores = torch.bmm(query, key.transpose(1, 2))
        elif recipe.product == "turned":
            scores = (key @ query.transpose(-2, -1)).transpose(-2, -1)
        elif recipe.product == "by hand":
            scores = torch.linalg.matmul(query, key.mT)
        else:
            scores = query @ key.transpose(-2, -1)
        scores = scores / 2 if recipe.scaling == "after" else scores
        mask = self.joined(query, key)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        scores = self.disturbed("scores", scores)
        probabilities = by_hand(scores) if recipe.product == "by hand" else scores.softmax(-1)
        self.seen = {"value": value, "probabilities": probabilities}
        probabilities = self.disturbed("probabilities", probabilities)
        if recipe.product == "einsum":
            return torch.einsum("bhnm,bhmd->bhnd", probabilities, value)
        return torch.bmm(probabilities, value) if recipe.product == "bmm" else probabilities @ value

    def told(self, query: Tensor, key: Tensor) -> dict[str, Tensor]:
        """The probabilities inside fused attention, which nothing of the model reads."""
        if torch.compiler.is_exporting():
            return {}
        scores, mask = query @ key.transpose(-2, -1) * DIM**-0.5, self.joined(query, key)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return {"probabilities": scores.softmax(-1)}

    def joined(self, query: Tensor, key: Tensor) -> Tensor | None:
        """The mask input as it meets the scores: of keys [B, M], of queries and keys [B, N, M], float or bool."""
        if self.mask is None:
            return None
        mask = self.mask.unsqueeze(1) if self.mask.dim() == 2 else self.mask
        mask = mask.unsqueeze(1)
        if self.recipe.product == "bmm":
            mask = mask.expand(-1, HEADS, query.shape[1], key.shape[1]).reshape(-1, query.shape[1], key.shape[1])
        return mask.to(query.dtype) if mask.is_floating_point() else mask

    def disturbed(self, place: str, t: Tensor) -> Tensor:
        for number, each in enumerate(self.recipe.disturbances):
            if each.place == place:
                t = KINDS[each.kind](self, t, each, number)
        return t

    def constant(self, number: int, shape: tuple[int, ...], make: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """A tensor of this shape that is drawn once, and lies in the module from then on."""
        name = f"constant{number}_{'_'.join(map(str, shape))}"
        if not hasattr(self, name):
            with torch.random.fork_rng():
                torch.manual_seed(number)
                self.register_buffer(name, make(shape))
        return getattr(self, name)


def shape_of(t: Tensor, each: Disturbance) -> tuple[int, ...]:
    """The shape of what joins `t`: of one element where it does not vary; never along the batch."""
    varies = (False, False, False, *each.axes)[-t.dim() :]
    return tuple(size if along and axis else 1 for axis, (size, along) in enumerate(zip(t.shape, varies, strict=True)))


def as_it_is(t: Tensor) -> Tensor:
    return t


def by_hand(scores: Tensor) -> Tensor:
    """A softmax over the last axis."""
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def axis_of(t: Tensor, each: Disturbance) -> int:
    """An axis of `t` other than the batch, counted from the end."""
    return -1 - each.axis % (t.dim() - 1)


def table(m: Disturbed, t: Tensor, each: Disturbance, number: int) -> Tensor:
    return m.constant(number, shape_of(t, each), lambda shape: 0.5 + 1.5 * torch.rand(shape)).to(t.dtype)


def chosen(m: Disturbed, t: Tensor, each: Disturbance, number: int) -> Tensor:
    """A boolean mask that leaves the first element along the last axis."""

    def make(shape: tuple[int, ...]) -> Tensor:
        mask = torch.rand(shape) < 0.4
        mask[..., 0] = shape[-1] == 1
        return mask

    return m.constant(number, shape_of(t, each), make)


def order(m: Disturbed, t: Tensor, each: Disturbance, number: int) -> Tensor:
    return m.constant(number, (t.shape[axis_of(t, each)],), lambda shape: torch.randperm(shape[0]))


def tail_scaled(t: Tensor, axis: int) -> Tensor:
    half = max(1, t.shape[axis] // 2)
    return torch.cat([t.narrow(axis, 0, half), 2 * t.narrow(axis, half, t.shape[axis] - half)], axis)


def shifted(t: Tensor, axis: int) -> Tensor:
    """Cut by one, and padded with zeros."""
    cut = t.transpose(axis, -1)[..., :-1]
    return F.pad(cut, (0, 1)).transpose(axis, -1)


def shortened(m: Disturbed, t: Tensor, each: Disturbance) -> Tensor:
    """Fewer queries, or fewer keys with their values, where no mask and no window fixes their number."""
    free = m.recipe.mask == "none" and m.recipe.layout != "windows" and t.shape[-2] > 1
    if not free or each.place not in ("query", "keys and values", "output", "projected"):
        return t
    return t[..., :: 1 + each.size, :] if each.size in (1, 2) else t.narrow(-2, each.size % 2, t.shape[-2] - 1)


def followed(m: Disturbed, t: Tensor, each: Disturbance) -> Tensor:
    """A tensor that follows the images, of one element along the axes where it does not vary."""
    single = [axis for axis, size in enumerate(shape_of(t, each)) if axis and size == 1]
    return (t.detach().cos().mean(single, keepdim=True) if single else t.detach().cos()) + 1.5


def in_place(t: Tensor, axis: int, write: Callable[[Tensor], Tensor]) -> Tensor:
    """The last along `axis` written over, in a view of a view: what shares the memory must not change with it."""
    own = t.clone()
    write(own.transpose(axis, -1)[..., -1])
    return own


def written(t: Tensor, axis: int, value: float) -> Tensor:
    t = t.clone()
    t.select(axis, -1).fill_(value)
    return t


def remembered(m: Disturbed, t: Tensor) -> Tensor:
    m.extra.append(t)
    return t


def counted(m: Disturbed, t: Tensor) -> Tensor:
    m.count.add_(1.0)  # type: ignore[operator]
    return t * m.count.to(t.dtype)  # type: ignore[operator]


def per_window(m: Disturbed, t: Tensor, each: Disturbance, number: int) -> Tensor:
    """What joins differs from window to window, or from head to head where these are folded into the batch."""
    groups = WINDOWS if m.recipe.layout == "windows" and t.shape[0] != 1 else HEADS
    folded = m.recipe.layout == "windows" or (m.recipe.product == "bmm" and t.dim() == 3)
    lead = groups if folded and each.place != "input" else 1  # the input is of images, which are not to be told apart
    constant = m.constant(number, (lead, *shape_of(t, each)[1:]), lambda shape: 0.5 + torch.rand(shape)).to(t.dtype)
    return (t.reshape(-1, lead, *t.shape[1:]) + constant).reshape(t.shape)


def kth_dropped(t: Tensor) -> Tensor:
    kept = t.topk(2, dim=-1).values[..., -1:]
    return torch.where(t < kept, -math.inf, t)


FILLS = (-1e4, -math.inf, 0.0, 1.0, -1e9, -5.0, 1e4, -65504.0, torch.finfo(torch.float32).min)
ALPHAS = (2, -1, 0.5, 3.0)
Kind = Callable[[Disturbed, Tensor, Disturbance, int], Tensor]
KINDS: dict[str, Kind] = {
    "times a tensor": lambda m, t, d, n: t * table(m, t, d, n),
    "times a tensor of fewer axes": lambda m, t, d, n: t * table(m, t, d, n).flatten(0, 1)[0],
    "times a tensor of the input": lambda m, t, d, n: t * followed(m, t, d),
    "plus a tensor of the input": lambda m, t, d, n: t + followed(m, t, d),
    "over a tensor": lambda m, t, d, n: t / table(m, t, d, n),
    "plus a tensor": lambda m, t, d, n: t + table(m, t, d, n),
    "plus alpha times a tensor": lambda m, t, d, n: torch.add(t, table(m, t, d, n), alpha=ALPHAS[d.size % 4]),
    "minus alpha times a tensor": lambda m, t, d, n: torch.sub(t, table(m, t, d, n), alpha=ALPHAS[d.size % 4]),
    "taken from a tensor": lambda m, t, d, n: torch.rsub(t, table(m, t, d, n), alpha=ALPHAS[d.size % 4]),
    "times a number": lambda m, t, d, n: t * (0.5 + d.size),
    "plus a number": lambda m, t, d, n: torch.add(t, 0.5, alpha=1 + d.size),
    "over a window's own": per_window,
    "filled": lambda m, t, d, n: t.masked_fill(chosen(m, t, d, n), FILLS[d.size % 9]),
    "kept where": lambda m, t, d, n: torch.where(chosen(m, t, d, n), FILLS[d.size % 9], t),
    "chosen where": lambda m, t, d, n: torch.where(chosen(m, t, d, n), t, FILLS[d.size % 9]),
    "times a mask": lambda m, t, d, n: t * chosen(m, t, d, n),
    "clamped": lambda m, t, d, n: t.clamp(-0.3 - d.size, 0.3),
    "clamped above": lambda m, t, d, n: t.clamp(max=0.2 * d.size),
    "clamped below": lambda m, t, d, n: t.clamp(min=-0.1 * d.size),
    "capped": lambda m, t, d, n: torch.tanh(t / 2) * 2,
    "rectified": lambda m, t, d, n: t.relu(),
    "absolute": lambda m, t, d, n: t.abs(),
    "squared": lambda m, t, d, n: t.square(),
    "rounded to integers": lambda m, t, d, n: (4 * t).int().to(t.dtype),
    "rounded to long": lambda m, t, d, n: (4 * t).long().to(t.dtype),
    "to bool": lambda m, t, d, n: (t > 0).to(t.dtype),
    "through half": lambda m, t, d, n: t.half().to(t.dtype),
    "through bfloat16": lambda m, t, d, n: t.bfloat16().to(t.dtype),
    "through double": lambda m, t, d, n: t.double().to(t.dtype),
    "flipped": lambda m, t, d, n: t.flip(axis_of(t, d)),
    "rolled": lambda m, t, d, n: t.roll(1 + d.size, axis_of(t, d)),
    "reordered": lambda m, t, d, n: t.index_select(axis_of(t, d), order(m, t, d, n)),
    "gathered": lambda m, t, d, n: t.gather(-1, order(m, t, Disturbance("", "", d.axes, 0, 0), n).expand(t.shape)),
    "sorted": lambda m, t, d, n: t.sort(axis_of(t, d)).values,
    "summed up": lambda m, t, d, n: t.cumsum(axis_of(t, d)),
    "dropped out": lambda m, t, d, n: F.dropout(t, 0.3),
    "read elsewhere": lambda m, t, d, n: remembered(m, t),
    "written over": lambda m, t, d, n: written(t, axis_of(t, d), (0.0, -1e4, -math.inf, 1.0)[d.size % 4]),
    "scaled in place": lambda m, t, d, n: in_place(t, axis_of(t, d), lambda part: part.mul_(0.5 + d.size)),
    "filled in place": lambda m, t, d, n: in_place(t, axis_of(t, d), lambda part: part.fill_(FILLS[d.size % 9])),
    "counted in a buffer": lambda m, t, d, n: counted(m, t),
    "its tail scaled": lambda m, t, d, n: tail_scaled(t, axis_of(t, d)),
    "cut and padded": lambda m, t, d, n: shifted(t, axis_of(t, d)),
    "shortened": lambda m, t, d, n: shortened(m, t, d),
    "less its mean": lambda m, t, d, n: t - t.mean(axis_of(t, d), keepdim=True),
    "less its maximum": lambda m, t, d, n: t - t.amax(axis_of(t, d), keepdim=True),
    "over its sum": lambda m, t, d, n: t / (0.1 + t.abs().sum(axis_of(t, d), keepdim=True)),
    "normalised": lambda m, t, d, n: F.normalize(t, dim=axis_of(t, d)),
    "times what it is": lambda m, t, d, n: t * t.mean(axis_of(t, d), keepdim=True),
    "its largest kept": lambda m, t, d, n: kth_dropped(t),
    "without NaN": lambda m, t, d, n: t.nan_to_num(0.0, 1.0, -1.0),
    "copied": lambda m, t, d, n: t.clone().contiguous(),
    "another softmax": lambda m, t, d, n: t.softmax(axis_of(t, d)),
    "sigmoid": lambda m, t, d, n: t.sigmoid(),
    "negated": lambda m, t, d, n: -t,
    "times its image's mean": lambda m, t, d, n: t * t.mean(tuple(range(1, t.dim())), keepdim=True),
    "over images": lambda m, t, d, n: t - t.mean(0, keepdim=True),
}  # fmt: skip
ROUNDED = frozenset(("through half", "through bfloat16"))  # float64 is no reference for these


disturbances = st.builds(
    Disturbance,
    place=st.sampled_from(PLACES),
    kind=st.sampled_from(sorted(KINDS)),
    axes=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    axis=st.integers(0, 2),
    size=st.integers(0, 8),
)
recipes = st.builds(
    Recipe,
    packing=st.sampled_from(["unbind", "chunk", "interleaved", "separate", "shared"]),
    product=st.sampled_from(["matmul", "turned", "bmm", "einsum", "by hand", "sdpa"]),
    layout=st.sampled_from(["plain", "windows", "cross", "class row"]),
    scaling=st.sampled_from(["before", "after", "none"]),
    mask=st.sampled_from(["none", "none", "keys", "keys and queries", "added"]),
    disturbances=st.lists(disturbances, min_size=1, max_size=3).map(tuple),
)


def build(recipe: Recipe) -> Disturbed:
    """The module, its constants drawn, in evaluation mode."""
    torch.manual_seed(0)
    module = Disturbed(recipe).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.8, 0.8)
        module(*inputs(recipe, 2, 0))
        module.count.zero_()  # type: ignore[operator]
    return module


def example(recipe: Recipe) -> tuple[Tensor, ...]:
    """What a user would give: pictures of noise, and a mask that drops nothing."""
    given = inputs(recipe, 2, 0)
    if recipe.mask == "none":
        return given
    return (*given[:-1], torch.zeros_like(given[-1]) if recipe.mask == "added" else torch.ones_like(given[-1]))


def inputs(recipe: Recipe, images: int, seed: int) -> tuple[Tensor, ...]:
    """New inputs: masks differ by image, key and, where they can, by query."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return 1.5 * torch.randn(shape, generator=generator)

    given = [noise(images, TOKENS * (WINDOWS if recipe.layout == "windows" else 1), WIDTH)]
    keys = MEMORY if recipe.layout == "cross" else TOKENS
    queries = 1 if recipe.layout == "class row" else TOKENS
    if recipe.layout == "cross":
        given.append(noise(images, MEMORY, WIDTH))
    folded = images * (WINDOWS if recipe.layout == "windows" else 1)
    if recipe.mask == "added":
        given.append(noise(folded, queries, keys))
    elif recipe.mask != "none":
        shape = (folded, keys) if recipe.mask == "keys" else (folded, queries, keys)
        mask = torch.rand(shape, generator=generator) < 0.6
        mask[..., 0] = True
        given.append(mask)
    return tuple(given)


@torch.no_grad()
def answers(model: Disturbed, given: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The module's own answer in float64, and the probabilities and value of its attention."""
    wide = copy.deepcopy(model).double()
    answer = wide(*(t.double() if t.is_floating_point() else t for t in given))
    return {"answer": answer, **wide.seen}


def unrounded(recipe: Recipe) -> Recipe:
    """The recipe without rounding to half precision, for which float64 is no reference."""
    kept = tuple(replace(each, kind="copied") if each.kind in ROUNDED else each for each in recipe.disturbances)
    return replace(recipe, disturbances=kept)


@torch.no_grad()
def jumps(
    model: Disturbed, unrounded: Disturbed, given: tuple[Tensor, ...], own: Mapping[str, Tensor], allowed: float
) -> set[str]:
    """What of the module's `own` answers changes by more than `allowed` where its inputs and weights change in the last
    digits of float64, or where nothing is rounded to half precision: integers are made of sums that lie on their edge,
    or rounding decides which of the largest scores is the largest, and each order of summing is as right as the next.
    What attention gives is shaken too: of values that are all alike no weight changes the sum.
    """
    generator = torch.Generator().manual_seed(0)

    def shaken(tensor: Tensor) -> Tensor:
        return tensor * (1 + 1e-13 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64))

    found = set()
    for other in (model, model, unrounded):
        other = copy.deepcopy(other).double()
        for weight in other.parameters():
            weight.copy_(shaken(weight))
        other.summed = shaken
        again = answers(other, tuple(shaken(t) if t.is_floating_point() else t for t in given))
        found |= {name for name, tensor in own.items() if known_error(again[name], tensor) > allowed}
    return found
