"""What a compiler cannot take of a program, told before it is compiled: by operator and node, with the way out."""

from collections.abc import Collection

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from attnrewrite.errors import InputError
from attnrewrite.patterns.fx.operators import module_path

TYPES = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    }
)  # fmt: skip


def require_compilable(program: ExportedProgram, compiler: str, types: Collection[torch.dtype] = TYPES) -> None:
    """Do nothing where every tensor of a program is of a known size and of a type that `compiler` computes in.

    Raises:
        InputError: one is not, which is named, or the program gives no tensor.
    """
    for node in program.graph.nodes:
        for value in _tensors(node):
            where = f"input {node.name!r}" if node.op == "placeholder" else described(node)
            if not all(isinstance(size, int) for size in value.shape):
                raise InputError(
                    f"{where} has a size that follows from values, and {compiler} compiles fixed sizes: take it out of "
                    "the model, or pad its result to a size that is known"
                )
            if value.dtype not in types:
                dtype = str(value.dtype).removeprefix("torch.")
                raise InputError(
                    f"{where} is {dtype}, which {compiler}'s code does not compute in: give the model in float32"
                )
    results = [argument for argument in program.graph.output_node().args[0] if isinstance(argument, Node)]
    if not any(_tensors(node) for node in results):
        raise InputError("the model gives no tensor: there is nothing to compile")


def described(node: Node) -> str:
    """A node by its operator, its name and the module that it stands in."""
    inside = module_path(node)
    return f"{node.target} (node {node.name!r}{f', in {inside}' if inside else ''})"


def _tensors(node: Node) -> list[Tensor]:
    value = node.meta.get("val")
    several = value if isinstance(value, tuple | list) else [value]
    return [each for each in several if isinstance(each, Tensor)]
