"""What nothing reads any more, taken out: operations, then the weights and submodules that only they read."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from attnrewrite.passes.base import Edit, Pass, PassResult


@dataclass(frozen=True)
class CleanUp(Pass[GraphModule]):
    """Drop operations that nothing reads, then weights and submodules that no operation reads.

    `pure` names operations that may go although torch counts them as impure, as it does attention for its dropout.
    """

    pure: frozenset[str] = frozenset()
    in_place: ClassVar[bool] = True

    def rewrite(self, graph: GraphModule) -> PassResult[GraphModule]:
        before = [node.name for node in graph.graph.nodes]
        graph.graph.eliminate_dead_code(lambda node: node.is_impure() and node.name not in self.pure)
        left = {node.name for node in graph.graph.nodes}
        gone = [name for name in before if name not in left] + list(drop_unused(graph))
        graph.recompile()
        return PassResult(graph, tuple(Edit(name) for name in gone))


def drop_unused(module: GraphModule) -> tuple[str, ...]:
    """Delete parameters, buffers and submodules that no node of the graph reads; the names of the tensors."""
    used = {str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module")}
    unused = tuple(name for name in _tensors(module) if not any(each in used for each in _holders(name)))
    for name in unused:
        owner, _, leaf = name.rpartition(".")
        delattr(module.get_submodule(owner), leaf)
    module.delete_all_unused_submodules()
    return unused


def _tensors(module: GraphModule) -> list[str]:
    """Parameters and buffers by every name that they have."""
    held = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [name for name, _ in held]


def _holders(name: str) -> Iterator[str]:
    """A tensor's name and those of the modules that hold it, outermost last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
