"""The linear maps that end a network's residual branches, and how what they give gets into the stream."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from attnrewrite.calibration.segments import Attended, Values, rewritten_site
from attnrewrite.calibration.way import MOVES, Step, map_axis, operation_of, shape_of, varying_nodes, way_to_stream
from attnrewrite.passes.site_module import ProjectedWrite, SiteModule, read, write

SOLVER_MATRICES = 7  # two sums, what is added to one of them, and three to solve
LEAST_GAIN = 0.1  # of a token's mean: what a normalisation hides more of is taken for as much

_REGROUPS = {"flatten", "view", "_unsafe_view", "reshape"}


@dataclass(frozen=True)
class Norm:
    """A batch normalisation behind a map that has no bias: its own stands for that, `gain` times as large."""

    weight: Tensor
    variance: Tensor
    epsilon: float

    @property
    def gain(self) -> Tensor:
        """What a bias of the map would be multiplied with [outputs]."""
        return (self.variance + self.epsilon).rsqrt() * self.weight.detach()


@dataclass(frozen=True)
class Branch:
    """y = x W^T + b at `node`, moved, scaled and shifted along `path`, then added to the stream at `stream`.

    `axis` is the one that the map works on: the last of tokens, the first after the batch where a convolution of one
    pixel is the map. `beside` is what it is added to; where nothing adds (no residual connection), that is None, and
    `stream` is `node` itself. `norm`: whose bias `bias` is, where it is not the map's.
    """

    node: Node
    path: tuple[Step, ...]
    stream: Node
    beside: Node | None
    weight: Tensor
    bias: Tensor | None
    site: SiteModule | None
    axis: int = -1
    norm: Norm | None = None

    @property
    def operands(self) -> frozenset[Node]:
        """The nodes whose values the path reads, beside what it carries."""
        return frozenset(operand for step in self.path for operand in step.operands)

    @property
    def reads(self) -> frozenset[Node | Attended]:
        """Whose values `samples` reads."""
        return self.wants | {self.input, self.node}

    @property
    def wants(self) -> frozenset[Node]:
        """Whose values `wanted` reads."""
        scales = frozenset() if self.normalised else self.operands
        return scales if self.beside is None else scales | {self.beside}

    @property
    def original(self) -> frozenset[Node]:
        """Whose values in the original both read."""
        if self.beside is None or not self.normalised:
            return frozenset({self.stream})
        return self.operands | {self.node, self.beside}

    @property
    def normalised(self) -> bool:
        """Whether a token is normalised by itself on the path, so that what one channel gives changes all others."""
        return any(step.measures for step in self.path)

    @property
    def input(self) -> Node | Attended:
        """What the map reads, beside its weights."""
        return self.node.args[0] if self.site is None else Attended(self.node)  # type: ignore[return-value]

    @property
    def solver_bytes(self) -> int:
        """What the statistics of a fit of the map take, and solving for it: float64, some matrices of all columns."""
        return SOLVER_MATRICES * 8 * (self.weight[0].numel() + 1) ** 2

    def inputs(self, values: Values) -> Tensor:
        """x [..., inputs]."""
        found = values[self.input]
        return found.movedim(self.axis, -1) if self.site is None else found.transpose(1, 2).flatten(2)

    def outputs(self, y: Tensor) -> Tensor:
        """A value at `node`, in the order of `inputs`: [..., outputs]."""
        if self.site is not None:
            assert isinstance(self.site.output, ProjectedWrite)
            y = read(y, self.site.output.layout).squeeze(1)
        return y.movedim(self.axis, -1)

    def by_token(self, rows: Tensor) -> Tensor:
        """A number for each row, as [batch, tokens]; of a map of pixels, as [batch, height, width]."""
        if self.site is None:
            lengths = self.outputs(self.node.meta["val"]).shape[1:-1]
            return rows.reshape(-1, *map(int, lengths))
        assert isinstance(self.site.output, ProjectedWrite)
        layout = self.site.output.layout
        return rows.reshape(layout.count(layout.batch), layout.count(layout.tokens))

    def spread(self, rows: Tensor, values: Values) -> Tensor:
        """A number for each row, in the order of `inputs`, as what to multiply a value at `stream` with: zero where no
        row reaches it.
        """
        ones = torch.ones_like(self.outputs(values[self.node]))
        moved = self.change_of_stream(rows.reshape(*ones.shape[:-1], 1) * ones, values)
        gain = self.change_of_stream(ones, values)
        return torch.where(gain == 0, gain, moved / gain)

    @torch.no_grad()
    def samples(self, values: Values, original: Values, weights: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Columns [samples, inputs], what has to be added to y [samples, outputs] for the stream to be the original's,
        and the ones that a bias multiplies [samples], where there is one: each times the root of `weights` [samples].
        Tokens that never reach the stream (padding) count nothing.
        """
        x = self.inputs(values)
        wanted, reaches = self.wanted(x[..., 0], values, original)
        target = wanted - self.outputs(values[self.node])
        root = weights.sqrt() * reaches.flatten()
        columns, target = (each.flatten(0, -2) * root.unsqueeze(1) for each in (x, target))
        return columns, target, None if self.bias is None else root

    def wanted(self, rows: Tensor, values: Values, original: Values) -> tuple[Tensor, Tensor]:
        """What y [..., outputs] has to be for the stream to be the original's, and which tokens reach it; `rows` is a
        tensor [...] of as many tokens. To first order about the original's y, where a token is normalised.
        """
        if self.beside is None:
            return self.changes(rows, original[self.stream], values)
        if not self.normalised:
            added = original[self.stream] - values[self.beside] - self.shift(rows, values)
            return self.changes(rows, added, values)
        change, reaches = self.changes(rows, original[self.beside] - values[self.beside], original)
        return self.outputs(original[self.node]) + change, reaches

    def changes(self, rows: Tensor, residual: Tensor, values: Values) -> tuple[Tensor, Tensor]:
        """What is to be added to y [..., outputs] for `residual` to be added to the stream, and which tokens reach it.

        The path P only moves and scales, so that P^T P is diagonal: the pseudo-inverse is P^T r / P^T P 1. A large
        change of a channel that a normalisation hides would be one of all others, by the token's variance: such
        channels are asked for less.
        """
        with torch.enable_grad():
            ones = rows.new_ones(*rows.shape, self.weight.shape[0]).requires_grad_()
            moved = self.change_of_stream(ones, values)
            (back,) = torch.autograd.grad(moved, ones, residual, retain_graph=True)
            (gain,) = torch.autograd.grad(moved, ones, moved.detach())
        reaches = gain.amax(-1) > 0
        if self.normalised:
            gain = gain.maximum(LEAST_GAIN * gain.mean(-1, keepdim=True))
        return back / gain.clamp(min=torch.finfo(gain.dtype).tiny), reaches

    @torch.no_grad()
    def change(self, delta: Tensor) -> None:
        """Add `delta` [columns, outputs] to the map."""
        inputs = self.weight.shape[1]
        self.weight.add_(delta[:inputs].T.to(self.weight).reshape(self.weight.shape))
        if self.bias is not None:
            change = delta[inputs].to(self.bias)
            self.bias.add_(change if self.norm is None else change * self.norm.gain)

    def saved(self) -> Callable[[], None]:
        """What puts the map back to how it is now."""
        weight, bias = self.weight.detach().clone(), None if self.bias is None else self.bias.detach().clone()

        @torch.no_grad()
        def restore() -> None:
            self.weight.copy_(weight)
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)

        return restore

    @torch.no_grad()
    def shift(self, rows: Tensor, values: Values) -> Tensor | float:
        """What the path adds to the stream whatever the map gives; `rows` is a tensor [...] of as many tokens."""
        if not any(step.shifts for step in self.path):
            return 0.0
        y = self._laid_out(rows.new_zeros(*rows.shape, self.weight.shape[0]))
        for step in self.path:
            y = step.apply_whole(y, values)
        return y

    def change_of_stream(self, y: Tensor, values: Values) -> Tensor:
        """What a change of y [..., outputs] makes in the stream."""
        y = self._laid_out(y)
        for step in self.path:
            y = step.apply(y, values)
        return y

    def _laid_out(self, y: Tensor) -> Tensor:
        """y [..., outputs] as the graph has it at `node`."""
        if self.site is not None:
            assert isinstance(self.site.output, ProjectedWrite)
            y = write(y.unsqueeze(1), self.site.output.layout)
        return y.movedim(-1, self.axis)


def branches(module: GraphModule) -> Iterator[Branch]:
    """The branches from the first rewritten site on, in the order of the graph.

    Every rewritten site with a traced output projection is one, and every linear map whose own weight nothing else
    reads and that ends a residual branch: a block's MLP, the attention of a site that was kept.
    """
    varying = varying_nodes(module)
    begun = False
    for node in module.graph.nodes:
        site = rewritten_site(module, node)
        begun = begun or site is not None
        if site is not None and isinstance(site.output, ProjectedWrite):
            own = site.output
            yield _with_bias(Branch(node, *way_to_stream(node, varying), own.weight, own.bias, site), module)
        elif begun and (axis := map_axis(node)) is not None and (tensors := _map_parameters(module, node)):
            path, stream, beside = way_to_stream(node, varying)
            if beside is not None:
                yield _with_bias(Branch(node, path, stream, beside, *tensors, None, axis), module)


def _with_bias(branch: Branch, module: GraphModule) -> Branch:
    """The branch with the bias of the batch normalisation behind it, where it has none and nothing else reads that."""
    behind = _norm_behind(branch) if branch.bias is None else None
    parts = () if behind is None else behind.args[1:5]
    stored = [part for part in parts if isinstance(part, Node) and part.op == "get_attr"]
    if behind is None or len(stored) < 4 or len(stored[1].users) > 1:
        return branch
    weight, bias, _, variance = (attrgetter(str(part.target))(module) for part in stored)
    norm = Norm(weight, variance, float(behind.args[7]))  # type: ignore[arg-type]
    return replace(branch, bias=bias, norm=norm) if isinstance(bias, nn.Parameter) else branch


def _norm_behind(branch: Branch) -> Node | None:
    """The batch normalisation that the map's outputs get to as they are, along the axis that it is over: 1."""
    outputs = str(branch.weight.shape[0])
    for step in branch.path:
        given = shape_of(step.carried)
        if operation_of(step.node) == "batch_norm":
            return step.node if branch.axis == 1 or (len(given) == 2 and given[1] == outputs) else None
        regroups = operation_of(step.node) in _REGROUPS and given[-1:] == shape_of(step.node)[-1:] == (outputs,)
        if branch.axis == 1 or not regroups:
            return None
    return None


def _map_parameters(module: GraphModule, node: Node) -> tuple[Tensor, Tensor | None] | None:
    """The weight and bias of a linear map: parameters that nothing else reads, or views of them made right before it,
    as of ONNX's [inputs, outputs], so that no cut lies between. No bias where it has none of its own: files store
    biases of zeros once for all.
    """
    views = set(takewhile(_moves_alone, _backwards(node.prev)))
    weight = _parameter(module, node.args[1], views)
    bias = _parameter(module, node.args[2], views) if len(node.args) > 2 else None
    return None if weight is None else (weight, bias)


def _parameter(module: GraphModule, node: object, views: Collection[Node]) -> Tensor | None:
    """The parameter that a node reads, by way of `views`, where nothing else reads it."""
    if not isinstance(node, Node) or len(node.users) != 1:
        return None
    if node.op == "get_attr":
        stored = attrgetter(str(node.target))(module)
        return stored if isinstance(stored, nn.Parameter) else None
    whole = _parameter(module, node.args[0], views) if node in views else None
    target: Any = node.target
    return None if whole is None else _view(whole, target(whole.detach(), *node.args[1:]))


def _view(whole: Tensor, made: Tensor) -> Tensor | None:
    """What was made of a tensor, where it is all of it and no copy."""
    same = made.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() and made.numel() == whole.numel()
    return made if same else None


def _moves_alone(node: Node) -> bool:
    """Whether one value alone is moved; where that makes a copy, `_view` says so."""
    return operation_of(node) in MOVES and len(node.all_input_nodes) == 1 and not node.kwargs


def _backwards(node: Node) -> Iterator[Node]:
    while node.op != "root":
        yield node
        node = node.prev
