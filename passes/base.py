"""What a pass is: options as fields, a contract around its work, and pipelines that say which of their passes failed.

A pass is a frozen dataclass. `requires` says what a graph must be, `rewrite` does the work, `ensures` says what the
result must be; both answer None, or a Refusal that completes "the graph ..." or "the result ...". Who has a pass
calls `apply`, or the pass itself for the graph alone.
"""

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import ClassVar, Generic, NamedTuple, TypeVar

from torch.fx import GraphModule

from attnrewrite.errors import AttnRewriteError, CheckFailedError, InputError, Refusal, first_line

DUMP = "ATTNREWRITE_DUMP"  # the environment variable that names a folder for the text of every stage's graph

G = TypeVar("G")


class PassFailedError(CheckFailedError):
    """A pass of a pipeline raised something of another library's, or of its own making."""


@dataclass(frozen=True)
class Edit:
    """One change: the operation, value or weight `replaced`, and `by` which; by None where it is gone."""

    replaced: str
    by: str | None = None


class PassResult(NamedTuple, Generic[G]):
    """The graph after a pass, and what the pass changed."""

    graph: G
    edits: tuple[Edit, ...] = ()

    @property
    def modified(self) -> bool:
        """Whether anything changed."""
        return bool(self.edits)


@dataclass(frozen=True)
class Pass(Generic[G]):
    """A change to graphs of type G; subclasses are frozen dataclasses, and their fields are the pass's options.

    The graph given is left as it was, unless the class says `in_place`: then it is the graph that comes back.
    """

    in_place: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """FoldConstants is called fold-constants."""
        return re.sub(r"(?<!^)(?=[A-Z])", "-", type(self).__name__).lower()

    def requires(self, graph: G) -> Refusal | None:
        """Why the pass cannot be applied to `graph`, or None when it can."""
        return None

    def rewrite(self, graph: G) -> PassResult[G]:
        """What the pass does to a graph that has what it requires."""
        raise NotImplementedError

    def ensures(self, before: G, result: PassResult[G]) -> Refusal | None:
        """What is wrong with the result, or None. Of a pass that works in place, `before` is the changed graph."""
        return None

    def apply(self, graph: G) -> PassResult[G]:
        """The graph rewritten, and what was edited: `(graph, edits)`.

        Raises:
            InputError: the graph is not what the pass requires.
            CheckFailedError: the result is not what the pass ensures.
        """
        refusal = self.requires(graph)
        if refusal is not None:
            raise InputError(f"{self.name} cannot be applied: the graph {refusal}", site=refusal.site)
        result = self.rewrite(graph)
        refusal = self.ensures(graph, result)
        if refusal is not None:
            raise CheckFailedError(f"{self.name} failed: the result {refusal}", site=refusal.site)
        return result

    def __call__(self, graph: G) -> G:
        """The graph that `apply` gives."""
        return self.apply(graph).graph


@dataclass(frozen=True)
class Stage(Generic[G]):
    """One pass of a pipeline that has run: the `number`-th, on `before`, for `seconds`."""

    pipeline: str
    number: int
    ran: Pass[G]
    before: G
    result: PassResult[G]
    seconds: float


@dataclass(frozen=True)
class Pipeline(Pass[G]):
    """Passes in order, as one pass: pipelines nest. `between` is called after each pass, to time, verify or print it.

    With ATTNREWRITE_DUMP=folder in the environment, the graph given and the graph after every pass are written there as
    text, numbered in the order in which the process wrote them.
    """

    passes: tuple[Pass[G], ...]
    between: Callable[[Stage[G]], None] | None = None
    name: str = "pipeline"

    def rewrite(self, graph: G) -> PassResult[G]:
        """The graph after all passes, with all their edits.

        Raises:
            AttnRewriteError: as the pass that failed raised it, its name and those that ran before it behind.
            PassFailedError: a pass raised anything else.
        """
        folder = os.environ.get(DUMP)
        if folder:
            _dump(Path(folder), f"{self.name}-given", graph)
        edits: tuple[Edit, ...] = ()
        for number, each in enumerate(self.passes):
            start = time.perf_counter()
            try:
                result = each.apply(graph)
                stage = Stage(self.name, number, each, graph, result, time.perf_counter() - start)
                if folder:
                    _dump(Path(folder), f"{self.name}-{each.name}", result.graph)
                if self.between is not None:
                    self.between(stage)
            except AttnRewriteError as error:
                raise type(error)(f"{error} ({self._place(number)})", site=error.site) from error
            except Exception as error:  # whatever a pass of someone else's raises
                told = f"{type(error).__name__}: {first_line(error)}"
                raise PassFailedError(f"{each.name} failed: {told} ({self._place(number)})") from error
            graph, edits = result.graph, edits + result.edits
        return PassResult(graph, edits)

    def _place(self, number: int) -> str:
        before = ", ".join(each.name for each in self.passes[:number])
        return f"pass {self.passes[number].name} of {self.name}, after {before or 'no other'}"


def _dump(folder: Path, title: str, graph: object) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("*.txt")))
        (folder / f"{number:03d}-{title}.txt").write_text(as_text(graph) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{DUMP}={folder}: cannot be written ({error.strerror}); name a folder") from error


@singledispatch
def as_text(graph: object) -> str:
    """A graph as text, as a dump has it."""
    return str(graph)


@as_text.register
def _(graph: GraphModule) -> str:
    return str(graph.print_readable(print_output=False))
