"""What a rule is: it looks at one value of a graph and gives a kernel that computes it, or says why it does not.

A kernel is data, too: which functions to call one after the other, on which tensors. A function's description says all
about its code, so that equal descriptions share one function.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from attnrewrite.errors import Refusal
from attnrewrite.targets.tvm.schedules.graph import Graph
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.view import Shape


@dataclass(frozen=True)
class Call:
    """A value of a graph that has to be computed: the result of `operator`."""

    graph: Graph
    var: Any
    operator: str


@dataclass(frozen=True)
class Argument:
    """A tensor that a function reads or writes."""

    shape: Shape
    dtype: str


class Function(Protocol):
    """The description of a function of loops, hashable."""

    @property
    def name(self) -> str: ...

    def build(self, arguments: Sequence[Argument], profile: Profile) -> Any:
        """The function as TIR: `arguments` are what it reads, then what it writes."""


@dataclass(frozen=True)
class Temporary:
    """What an earlier step of the same kernel wrote."""

    step: int


@dataclass(frozen=True, eq=False)
class Step:
    """One call: `function` reads `arguments` (Relax variables, numpy arrays, temporaries) and writes a new tensor.

    `shape` and `dtype` are the tensor's (None: of the type that the processor stores): a temporary, but for the
    kernel's last step, whose tensor is the value asked for.
    """

    function: Function
    arguments: tuple[Any, ...]
    shape: Shape
    dtype: str | None = None


@dataclass(frozen=True, eq=False)
class Kernel:
    """Steps that compute a value, and `covers`: the variables whose operators they compute, the value's own first."""

    steps: tuple[Step, ...]
    covers: tuple[Any, ...]


@dataclass(frozen=True)
class Rule:
    """`apply` gives the kernel of a call for a processor, or the reason why this rule has none."""

    name: str
    apply: Callable[[Call, Profile], Kernel | Refusal]
