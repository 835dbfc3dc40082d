"""Graphs with an open batch: inputs whose first axis is a symbol, and the size of every value that follows from it."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.export import Dim
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from attnrewrite.errors import Refusal, first_line
from attnrewrite.passes.copying import without_torch_logs
from attnrewrite.passes.tracing import export_program
from attnrewrite.patterns.fx.operators import is_open, module_path, operator_name

BATCH = Dim("batch", min=1)


class _Inputs(nn.Module):
    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [tensor.clone() for tensor in inputs]


def symbolic(example: Sequence[Tensor], open_inputs: Collection[int], images: int) -> list[Tensor]:
    """`example` as tensors without numbers, the first axis of `open_inputs` the same symbol, `images` for a hint."""
    sized = [_resized(t, images) if place in open_inputs else t for place, t in enumerate(example)]
    shapes = tuple({0: BATCH} if place in open_inputs else None for place in range(len(sized)))
    program = export_program(_Inputs(), tuple(sized), dynamic_shapes=(shapes,))
    return [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]


def _resized(tensor: Tensor, images: int) -> Tensor:
    return tensor.new_zeros((images, *tensor.shape[1:]))


def open_axes(value: object) -> list[int]:
    """The axes of a tensor that follow the batch."""
    return [axis for axis, size in enumerate(value.shape) if is_open(size)] if isinstance(value, Tensor) else []


def follows(value: object) -> bool:
    return any(open_axes(leaf) for leaf in tree_leaves(value))


def described(node: Node) -> str:
    """A node by its name, its operator and the module that it stands in."""
    inside = module_path(node)
    return f"{node.name} ({operator_name(node)}{f', in {inside}' if inside else ''})"


class LostError(Exception):
    """The images cannot be followed through a node: a refusal's code, and its sentence without the node."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code

    def refusal(self, node: Node) -> Refusal:
        return Refusal(self.code, f"{self} at {described(node)}")


class Symbolic(Interpreter):
    """Runs nodes of `module` one by one on `inputs` that are symbolic: nothing is computed but sizes."""

    def __init__(self, module: GraphModule, inputs: Sequence[Tensor]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.args_iter: Iterator[Any] = iter(inputs)
        self.mode = inputs[0].fake_mode  # type: ignore[attr-defined]
        self.batch = inputs[0].shape[0]

    @torch.no_grad()
    def value(self, node: Node) -> Any:
        """The value of the next `node`, kept for those that read it. Raises LostError where it settles the batch."""
        with self.mode, enable_python_dispatcher():
            found = self.run_node(node)
            if isinstance(found, Tensor) and node.op == "get_attr":
                found = self.mode.from_tensor(found, static_shapes=True)
        if not is_open(self.batch):
            raise LostError("batch-settled", "settles its batch")
        self.env[node] = found
        return found


def with_sizes(module: GraphModule, inputs: Sequence[Tensor]) -> Refusal | None:
    """Write the size that each node of `module` has for symbolic `inputs` into its `val`, in place."""
    run = Symbolic(module, inputs)
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        try:
            with without_torch_logs():
                value = run.value(node)
        except LostError as lost:
            return lost.refusal(node)
        except Exception as error:  # operators raise many kinds
            return Refusal("batch-refused", f"takes no other batch at {described(node)}: {first_line(error)}")
        node.meta["val"] = value if node.op != "get_attr" else node.meta.get("val", value)
    return None
