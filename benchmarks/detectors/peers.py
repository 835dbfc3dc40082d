"""What finds attention: attnrewrite on either graph, and the pattern passes of torch and the ONNX runtimes.

Each peer runs as its documentation has it run, and is credited with every attention operator in the graph that it
leaves, whether it fused it or the model spelled it as one. The exports have a fixed batch of two.
"""

import importlib.metadata
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

OPSET = 18


@dataclass(frozen=True)
class Found:
    """One attention that a peer reports. `axis` is None where it tells no channels from tokens; sizes, if unknown."""

    n_queries: int | None = None
    n_keys: int | None = None
    axis: str | None = None


class Failed(Exception):
    """A step before the peer's own did not succeed."""


class Subject:
    """One model in every form that a peer reads. A form that failed once is not tried again."""

    def __init__(self, model: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> None:
        self.model, self.inputs, self._folder = model, inputs, folder
        self._failures: dict[str, str] = {}

    def exported(self) -> ExportedProgram:
        return self._once("torch.export", lambda: self._exported)

    def onnx_file(self) -> Path:
        self.exported()
        return self._once("torch.onnx.export", lambda: self._onnx_file)

    def _once(self, step: str, make: Callable[[], Any]) -> Any:
        if step in self._failures:
            raise Failed(self._failures[step])
        try:
            return make()
        except Exception as error:  # what exporters raise has no common base
            self._failures[step] = f"{step}: {first_line(error)}"
            raise Failed(self._failures[step]) from error

    @cached_property
    def _exported(self) -> ExportedProgram:
        with torch.no_grad():
            return torch.export.export(self.model, self.inputs)

    @cached_property
    def _onnx_file(self) -> Path:
        path = self._folder / "model.onnx"
        program = torch.onnx.export(self._exported, (), dynamo=True, opset_version=OPSET, verbose=False)
        assert program is not None
        program.save(path)
        return path


@dataclass(frozen=True)
class Peer:
    """`package` is what it comes with, `how` what of it is run; `find` runs it on a model."""

    package: str
    how: str
    find: Callable[[Subject], list[Found]]

    def version(self) -> str | None:
        return version(self.package)


def attnrewrite_fx(subject: Subject) -> list[Found]:
    import attnrewrite

    return [Found(site.n_queries, site.n_keys, site.axis) for site in attnrewrite.explain(subject.exported()).sites]


def attnrewrite_onnx(subject: Subject) -> list[Found]:
    import attnrewrite

    return [Found(site.n_queries, site.n_keys, site.axis) for site in attnrewrite.explain(subject.onnx_file()).sites]


def inductor(subject: Subject) -> list[Found]:
    """The graph that torch.compile would lower for inference, after inductor's joint-graph passes."""
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    found: list[Found] = []

    def compile_nothing(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        joint_graph_passes(gm)
        calls = [node for node in gm.graph.nodes if "scaled_dot_product" in str(node.target)]
        calls = [node for node in calls if "getitem" not in str(node.target)]
        found.extend(_fx_sizes(node) for node in calls)
        return make_boxed_func(gm.forward)

    flat: Any = _Flat(subject.exported().module(check_guards=False))
    with torch.no_grad():
        aot_module_simplified(
            flat, subject.inputs, fw_compiler=compile_nothing, inference_compiler=compile_nothing,
            decompositions=select_decomp_table(),
        )  # fmt: skip
    return found


def onnxruntime(subject: Subject) -> list[Found]:
    """onnxruntime.transformers.optimizer for vision transformers, after the runtime's own graph optimizations."""
    from onnxruntime.transformers.optimizer import optimize_model

    model = optimize_model(str(subject.onnx_file()), model_type="vit", opt_level=2)
    fused = {"Attention", "MultiHeadAttention", "PackedAttention", "GroupQueryAttention", "QAttention"}
    return [Found() for node in model.model.graph.node if node.op_type in fused]


def onnxscript(subject: Subject) -> list[Found]:
    """onnxscript's fusions for onnxruntime."""
    import onnx_ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model, _ = optimize_for_ort(onnx_ir.load(subject.onnx_file()))
    fused = {"Attention", "MultiHeadAttention", "GroupQueryAttention", "SDPA"}
    return [_ir_sizes(node) for node in model.graph if node.op_type in fused]


def openvino(subject: Subject) -> list[Found]:
    """What openvino.convert_model leaves: its SDPA fusion is among the transformations that this runs."""
    import openvino

    os.environ.setdefault("CI", "true")  # else every conversion sends usage statistics
    model = openvino.convert_model(str(subject.onnx_file()))
    fused = [op for op in model.get_ordered_ops() if op.get_type_name() == "ScaledDotProductAttention"]
    shapes = [[op.input_value(place).get_partial_shape().to_string() for place in (0, 1)] for op in fused]
    return [Found(_length(query, -2), _length(key, -2)) for query, key in shapes]


PEERS = {
    "attnrewrite-fx": Peer("attnrewrite", "attnrewrite.explain on the exported program", attnrewrite_fx),
    "attnrewrite-onnx": Peer("attnrewrite", "attnrewrite.explain on the ONNX export", attnrewrite_onnx),
    "inductor": Peer("torch", "torch inductor's joint-graph passes", inductor),
    "onnxruntime": Peer("onnxruntime", "onnxruntime.transformers.optimizer, model_type vit", onnxruntime),
    "onnxscript": Peer("onnxscript", "onnxscript.rewriter.ort_fusions", onnxscript),
    "openvino": Peer("openvino", "openvino.convert_model", openvino),
}


def version(package: str) -> str | None:
    """Of an installed package; None where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def first_line(error: BaseException) -> str:
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()  # some exporters colour their errors
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


class _Flat(nn.Module):
    """A module whose result is a flat tuple, as ahead-of-time compilation wants it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for part in module.modules():  # constants that the export left as plain attributes would stay real tensors
            for name, value in [(name, value) for name, value in vars(part).items() if isinstance(value, Tensor)]:
                delattr(part, name)
                part.register_buffer(name, value)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(pytree.tree_leaves(self.module(*inputs)))


def _fx_sizes(node: torch.fx.Node) -> Found:
    values = [argument.meta.get("val") for argument in node.args[:2] if isinstance(argument, torch.fx.Node)]
    sizes = [int(value.shape[-2]) for value in values if isinstance(value, Tensor)]
    return Found(sizes[0], sizes[1]) if len(sizes) == 2 else Found()


def _ir_sizes(node: Any) -> Found:
    """Queries and keys of [batch, heads, tokens, channels] operands; packed ones say less."""
    shapes = [None if value is None or value.shape is None else value.shape for value in node.inputs[:2]]
    if node.op_type == "Attention" or any(shape is None or len(shape) not in (3, 4) for shape in shapes):
        return Found()
    sizes = [shape[-2] for shape in shapes if shape is not None]
    return Found(sizes[0], sizes[1]) if all(isinstance(size, int) for size in sizes) else Found()


def _length(shape: str, axis: int) -> int | None:
    """One length of a shape as OpenVINO writes it, "[2,3,17,?]"."""
    length = shape.strip("[]").split(",")[axis]
    return int(length) if length.isdigit() else None
