"""Operators written out in others: the pass that does it, and what an operator is written out in.

What compilers misread is written out as `misread` says, what they fail at as `lacking` says, the rest as torch does.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram

from attnrewrite.errors import Refusal
from attnrewrite.passes.base import Edit, Pass, PassResult
from attnrewrite.passes.fx.lacking import FALLBACKS, LACKING
from attnrewrite.passes.fx.signature import other_signature, writes_in_place
from attnrewrite.passes.tracing import decompose_program


@dataclass(frozen=True)
class Decompose(Pass[ExportedProgram]):
    """The operators of `table` written out as its functions say, and none left that writes in place.

    A function that returns NotImplemented leaves its operator as it is.
    """

    table: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)

    def rewrite(self, graph: ExportedProgram) -> PassResult[ExportedProgram]:
        if not self.table and graph.dialect == "ATEN":  # which says that it was decomposed
            return PassResult(graph)
        program = decompose_program(graph, self.table)
        before, after = _operators(graph), _operators(program)
        gone = tuple(Edit(str(operator)) for operator in (before - after).elements())
        relabelled = () if graph.dialect == program.dialect else (Edit(graph.dialect, program.dialect),)
        return PassResult(program, gone + relabelled)

    def ensures(self, before: ExportedProgram, result: PassResult[ExportedProgram]) -> Refusal | None:
        """The same inputs and outputs, and no operator that writes in place."""
        return other_signature(before, result.graph) or writes_in_place(result.graph)


def in_others(operators: Iterable[Any]) -> dict[Any, Callable[..., Any]]:
    """What `operators` are written out in, by us or by torch; those that neither writes out are left out."""
    wanted = [each for each in operators if isinstance(each, torch._ops.OpOverload)]
    composite = torch.export.default_decompositions()
    found: dict[Any, Callable[..., Any]] = torch._decomp.get_decompositions(wanted)
    composites = {each: composite[each] for each in wanted if each in composite}
    ours = LACKING | FALLBACKS
    return found | composites | {each: ours[each] for each in wanted if each in ours}


def either(first: Mapping[Any, Callable[..., Any]], then: Mapping[Any, Callable[..., Any]]) -> dict[Any, Any]:
    """Both tables in one: what `first` leaves of an operator is written out as `then` says."""

    def both(one: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*given: Any, **options: Any) -> Any:
            found = one(*given, **options)
            return other(*given, **options) if found is NotImplemented else found

        return compute

    return {**then, **{each: both(one, then[each]) if each in then else one for each, one in first.items()}}


def _operators(program: ExportedProgram) -> Counter[Any]:
    return Counter(node.target for node in program.graph.nodes if node.op == "call_function")
