"""What the matcher may ask of a graph, whichever frontend it came from.

Each frontend normalises its operators to one small vocabulary, `Kind`. Index arrays are numpy int64, so that tracing
needs no framework of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

Kind = Literal[
    "input",  # a tensor given by the caller
    "constant",  # a parameter, buffer or literal tensor
    "move",  # pure data movement: reshape, permute, slice, cat, roll, expand, pad, ...
    "map",  # elementwise, broadcasting
    "matmul",  # batched product of the last two axes
    "linear",  # x weight^T + bias, over the last axis
    "conv",  # convolution over [batch, channels, ...]
    "norm",  # normalisation that keeps positions
    "pool",  # keeps batch and channels of [batch, channels, ...], changes the positions
    "reduce",  # a reduction over axes
    "softmax",
    "sdpa",
    "other",
]


@dataclass(frozen=True)
class Operation:
    """One value of the graph and how it is made.

    `inputs` are the tensor operands. `attributes` by kind:

    * softmax: `axis`; `factor`, what its operand is multiplied with (absent: 1); where it gives exponentials alone,
      whose sum divides their product with the values, that quotient is `divided`. reduce: `axes`.
      linear: `transposed`. conv: `pointwise`, `depthwise`.
    * map: `scalar` and `position`, a Python number that stands beside the one tensor operand, and on which side; for
      add and sub `alpha`, what the second operand is multiplied with (absent: 1); `random` where equal elements need
      not give equal ones.
    * move: `directed_by`, the operands (not among `inputs`) whose values say what is read, if the input of the graph
      decides them.
    * norm: `style`; "batch" is a BatchNorm by stored statistics, with the values `weight` and `bias` (or None), `mean`
      and `variance`, and `epsilon`.
    * sdpa: `scale`, `causal`, `mask` (a value or None), `dropout` (a probability; absent: 0).
    """

    value: str
    kind: Kind
    name: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, object] = field(default_factory=dict)


class GraphView(Protocol):
    """A graph as values (named tensors) and the operations that make them."""

    @property
    def frontend(self) -> Literal["fx", "onnx"]: ...

    @property
    def values(self) -> tuple[str, ...]:
        """Every value, producers before users."""
        ...

    def operation(self, value: str) -> Operation: ...

    def shape(self, value: str) -> tuple[int, ...]:
        """The concrete shape; an axis that follows the batch has the example's size."""
        ...

    def batch_axes(self, value: str) -> frozenset[int]:
        """The axes whose length follows the batch size (none where the graph is static)."""
        ...

    def users(self, value: str) -> tuple[str, ...]: ...

    def move(self, value: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Replay one data movement on index arrays; new elements (padding) become 0."""
        ...

    def is_constant(self, value: str) -> bool:
        """Whether the value depends on no input of the graph."""
        ...

    def is_boolean(self, value: str) -> bool:
        """Whether the elements are True and False."""
        ...

    def constant(self, value: str) -> np.ndarray:
        """The elements of a value that is constant."""
        ...

    def scope(self, value: str) -> str:
        """The module path that the value was computed in, or its node's name."""
        ...

    def title(self, value: str) -> str:
        """What the model itself calls the value: a parameter by its path, anything else by its own name."""
        ...


def parameters_of(graph: GraphView, value: str) -> tuple[str, ...]:
    """The leaf constants a constant value is computed from, in order of first use."""
    found: dict[str, None] = {}
    pending = [value]
    seen: set[str] = set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        operation = graph.operation(current)
        if operation.kind == "constant":
            found[current] = None
        pending.extend(reversed(operation.inputs))
    return tuple(found)


class ComputedConstants:
    """A view in which what linear maps make of constants counts as tokens: the queries of a decoder's first layer."""

    def __init__(self, graph: GraphView) -> None:
        self._graph = graph
        self._live: dict[str, bool] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._graph, name)

    def is_constant(self, value: str) -> bool:
        if not self._graph.is_constant(value):  # before its operands are asked, as graphs are deeper than a stack
            return False
        if value not in self._live:
            operation = self._graph.operation(value)
            projects = operation.kind in ("linear", "matmul", "sdpa")
            self._live[value] = projects or any(not self.is_constant(operand) for operand in operation.inputs)
        return not self._live[value]
