"""The records every layer speaks: what an attention site is, and what almost was one.

Records are frozen data; matching returns them, rewriting consumes them. Values (tensors) of a graph are named by
strings, so that the same record serves FX and ONNX.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal

from attnrewrite.errors import InputError, Refusal

Anchor = Literal["softmax", "sdpa", "attention-op"]
Kind = Literal["self", "cross"]
Axis = Literal["token", "channel"]
Bias = Literal["none", "constant", "input", "depends-on-query"]
Frontend = Literal["fx", "onnx"]


@dataclass(frozen=True)
class Layout:
    """How the axes of one tensor read as batch, heads, tokens and channels.

    The tensor of shape `shape` is viewed as `split`; the axes of that view are then grouped, in order, into
    [batch, heads, tokens, channels]. An axis whose length follows the batch size is -1 in `shape` and in `split`.
    Window axes count as batch.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    batch: tuple[int, ...]
    heads: tuple[int, ...]
    tokens: tuple[int, ...]
    channels: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of the split view, permuted into [batch, heads, tokens, channels]."""
        return (*self.batch, *self.heads, *self.tokens, *self.channels)

    def count(self, axes: tuple[int, ...]) -> int:
        """The product of the given split axes, or -1 when one of them follows the batch."""
        sizes = [self.split[axis] for axis in axes]
        return -1 if -1 in sizes else math.prod(sizes)


@dataclass(frozen=True)
class Operand:
    """A value of the graph and how it reads."""

    value: str
    layout: Layout


@dataclass(frozen=True)
class Term:
    """A tensor that joins the scores: a relative position bias, an attention mask.

    `operand.value` broadcasts against a tensor of `operand.layout.shape`, which reads as [batch, heads, queries, keys].
    Where `dropped` is None, its numbers times `factor` are added to the scores. Else it is boolean, and `filling`
    stands in place of the scores wherever it is `dropped`: False drops a key from torch's fused attention, either may
    in a `where`.
    """

    operand: Operand
    factor: float = 1.0
    dropped: bool | None = None
    filling: float = -math.inf


@dataclass(frozen=True)
class Core:
    """The heart of a site, as the graph's own tensors: out = softmax(scale * query key^T + terms) value.

    `scale` multiplies the product of `query` and `key` as they stand here; a factor applied before them is already
    in them. `temperature` is a tensor that multiplies the scores before the terms join them, proven to be one number
    for each image and head.
    """

    query: Operand
    key: Operand
    value: Operand
    output: Operand
    scale: float
    temperature: Operand | None = None
    terms: tuple[Term, ...] = ()

    @property
    def filling(self) -> float:
        """What stands in place of the scores that masks drop, the same for all masks: their order is no matter.

        A row whose keys are all dropped weighs them equally where it is finite; where it is -inf, torch's fused
        attention makes zeros of it and a softmax no number.
        """
        return max((term.filling for term in self.terms if term.dropped is not None), default=-math.inf)


@dataclass(frozen=True)
class Normalization:
    """A BatchNorm after a projection, to be folded into it: the graph's values and epsilon."""

    weight: str | None
    bias: str | None
    mean: str
    variance: str
    epsilon: float


@dataclass(frozen=True)
class Projection:
    """A linear map or 1x1 convolution whose weights depend on parameters alone.

    `input` is what it reads, as [batch, 1, tokens, channels]; None where its tokens are moved on the way in a manner
    that no single reshape gives. `weight` and `bias` name values of the graph, computed from `parameters`; the weight
    is [out, in] unless `transposed`. `rows` are its output channels in (head, channel) order: packed, separate and
    shuffled projections differ only here. `direct` says that nothing but data movement
    and `factor` lies between the map and the core (no normalisation of queries, no rotary embedding).
    """

    input: Operand | None
    weight: str
    bias: str | None
    rows: tuple[int, ...]
    parameters: tuple[str, ...]
    transposed: bool = False
    normalization: Normalization | None = None
    factor: float = 1.0
    direct: bool = True


@dataclass(frozen=True)
class OutputProjection:
    """The linear map that reads the heads' outputs: `columns` are its input channels in (head, channel) order.

    `output` is what it writes, as [batch, 1, tokens, channels]. `direct` says that this is known and that nothing but
    data movement lies between (no activation, no normalisation of the heads' outputs, no other reader of them).
    """

    output: Operand | None
    weight: str
    bias: str | None
    columns: tuple[int, ...]
    parameters: tuple[str, ...]
    transposed: bool = False
    normalization: Normalization | None = None
    direct: bool = True


@dataclass(frozen=True)
class Untraced(Refusal):
    """Why a projection could not be traced to parameters."""


@dataclass(frozen=True)
class Grid:
    """Tokens that are an image: `prefix` tokens first, then `rows` x `columns` in row-major order."""

    rows: int
    columns: int
    prefix: int = 0

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}" + (f"+{self.prefix}" if self.prefix else "")

    @classmethod
    def parse(cls, text: str) -> "Grid":
        """'14x14' or, with one token before the image, '14x14+1'. Raises InputError for anything else."""
        match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})(?:\+(\d{1,4}))?", text.strip())
        if match is None:
            raise InputError(f"grid={text} is no grid: write rows x columns + tokens before them, as in 14x14+1")
        rows, columns, prefix = (int(part or 0) for part in match.groups())
        return cls(rows, columns, prefix)

    @property
    def tokens(self) -> int:
        return self.prefix + self.rows * self.columns


@dataclass(frozen=True)
class AttentionSite:
    """One softmax(Q K^T) V in a graph.

    `name` is the module path (FX) or the node's name (ONNX); `nodes` the graph nodes that belong to the site.
    `windows` is the number of windows each image is folded into (1: not windowed). `scale` is the total factor
    on the scores; None where it is a tensor. `core` is None where the scores or the probabilities pass through more
    than scale, bias and softmax: `core_reason` says what.
    `bias_of_keys` says that the bias is proven to be the same for all queries and heads, as a mask of padded tokens is.
    `fingerprint` names the traced projections' weights by a few numbers, the same in any frontend; None without any.
    `members` are the ids of the sites that this one was made of, where heads were computed apart (`Group`).
    """

    id: str
    name: str
    frontend: Frontend
    anchor: Anchor
    kind: Kind
    axis: Axis
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    n_queries: int
    n_keys: int
    windows: int
    scale: float | None
    bias: Bias
    core: Core | None
    query: Projection | Untraced
    key: Projection | Untraced
    value: Projection | Untraced
    output: OutputProjection | Untraced
    core_reason: Refusal | None = None
    grid: Grid | None = None
    bias_of_keys: bool = False
    causal: bool = False
    qk_norm: bool = False
    rope: bool = False
    talking_heads: bool = False
    probs_escape: bool = False
    fingerprint: str | None = None
    nodes: tuple[str, ...] = ()
    members: tuple[str, ...] = ()

    @property
    def windowed(self) -> bool:
        return self.windows > 1

    @property
    def projections(self) -> tuple[Projection | Untraced, Projection | Untraced, Projection | Untraced]:
        return self.query, self.key, self.value


@dataclass(frozen=True)
class NearMiss(Refusal):
    """Why the softmax, SDPA or attention op that makes the value `name` is no site. `anchor` says which it is."""

    anchor: str
    name: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Sites whose results one operation joins, by their ids in that order: heads of one attention, computed in a loop.

    `output` is what the operation makes, read as [batch, heads, tokens, channels] with the members' heads in order;
    a refusal where the sites are no heads of one attention.
    """

    members: tuple[str, ...]
    output: Operand | Refusal

    @property
    def id(self) -> str:
        """What the group is called, and the one site of its heads: the first member's id."""
        return self.members[0]

    @property
    def apart(self) -> Refusal | None:
        """Why the members are no heads of one attention."""
        return self.output if isinstance(self.output, Refusal) else None


@dataclass(frozen=True, repr=False)
class Scan:
    """Every softmax, SDPA and attention op of a graph, as a site or as a near miss, and which sites are joined."""

    model: str
    frontend: Frontend
    sites: tuple[AttentionSite, ...]
    near_misses: tuple[NearMiss, ...]
    groups: tuple[Group, ...] = ()

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        """One line, as sites hold all that is known of them."""
        return f"<Scan of {self.model}: sites {len(self.sites)}, near misses {len(self.near_misses)}>"

    def group_of(self, site: str) -> str | None:
        """The id of the group of heads that a site belongs to, by its own id; None where it stands alone."""
        return next((group.id for group in self.groups if group.apart is None and site in group.members), None)
