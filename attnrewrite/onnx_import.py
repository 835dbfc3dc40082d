"""ONNX -> FX: an ONNX model as a torch module, so that it can be calibrated, and reach targets that read no ONNX.

Constants are folded first, and what exporters compute of shapes with them: a reshape becomes its sizes, the batch left
open. Every operator that is translated is in `onnx_import_ops`, `onnx_import_moves` and `onnx_import_layers`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.patterns.onnx import OnnxGraph
from attnrewrite.patterns.onnx_ops import SHAPE_ONLY
from attnrewrite.patterns.onnx_recognise import attribute_name
from attnrewrite.patterns.onnx_sizes import real_inputs

TOLERANCE = 1e-4


def import_model(
    model: ir.Model, input_sizes: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[GraphModule, tuple[Tensor, ...]]:
    """`model` as a torch module, and inputs that it runs on; checked against onnxruntime on these.

    Parameters are named by `attribute_name` of the initialisers. `input_sizes` gives what the inputs leave open beyond
    the batch, by input name.

    Raises:
        InputError: an operator is not translated (named, with its node and opset), or onnxruntime is not installed.
        CheckFailedError: the module differs from onnxruntime by more than TOLERANCE.
    """
    graph = OnnxGraph(model, input_sizes)
    module = _Importer(graph).run()
    inputs = example_inputs(graph)
    error = difference(model, module, inputs)
    if not error <= TOLERANCE:
        raise CheckFailedError(
            f"the imported model differs from onnxruntime by {error:.2e} (allowed {TOLERANCE:.0e}); please report it"
        )
    return module, inputs


def example_inputs(graph: OnnxGraph) -> tuple[Tensor, ...]:
    """Random inputs of the graph's sizes: normal numbers, or whole ones from 0 to 255."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for value in real_inputs(graph.prepared.model.graph):
        size = graph.shape(str(value.name))
        dtype = torch_dtype(graph.dtype(str(value.name)))
        if dtype.is_floating_point:
            found.append(torch.randn(size, generator=generator, dtype=torch.float32).to(dtype))
        else:
            top = 2 if dtype == torch.bool else 256 if dtype == torch.uint8 else 128
            found.append(torch.randint(0, top, size, generator=generator).to(dtype))
    return tuple(found)


def difference(model: ir.Model, module: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    """The largest difference between a torch module and the model in onnxruntime, over the largest value."""
    import tempfile
    from pathlib import Path

    try:
        import onnxruntime
    except ImportError as error:
        raise InputError("onnxruntime is not installed (pip install 'attnrewrite[onnx]')") from error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        ir.save(model, path, external_data="model.data", format="protobuf")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        try:
            session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            names = [value.name for value in session.get_inputs()]
            wanted = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})
        except Exception as error:  # onnxruntime raises many kinds
            line = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise InputError(f"onnxruntime does not run the model: {line}") from error
    with torch.no_grad():
        found = module(*inputs)
    pairs = zip(found if isinstance(found, tuple) else (found,), wanted, strict=True)
    return max(_relative(mine, torch.from_numpy(np.asarray(theirs))) for mine, theirs in pairs)


def _relative(found: Tensor, wanted: Tensor) -> float:
    if not wanted.numel():
        return 0.0
    scale = wanted.double().abs().max().clamp_min(1e-6)
    return float((found.double() - wanted.double()).abs().max() / scale)


def torch_dtype(number: int) -> torch.dtype:
    """The torch type of an ONNX element type.

    Raises:
        InputError: torch has none.
    """
    name = ir.DataType(number).name.lower()
    aliases = {"float": "float32", "double": "float64"}
    found = getattr(torch, aliases.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"torch has no type for ONNX's {name}")
    return found


@dataclass(frozen=True)
class Call:
    """One ONNX node being translated."""

    importer: "_Importer"
    node: ir.Node

    def emit(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Node:
        return self.importer.graph.call_function(function, arguments, named)

    def has(self, place: int) -> bool:
        return place < len(self.node.inputs) and self.node.inputs[place] is not None

    def name(self, place: int) -> str:
        operand = self.node.inputs[place]
        assert operand is not None
        return str(operand.name)

    def operand(self, place: int) -> Any:
        """The FX node of an operand; None where it is left out."""
        return self.importer.operand(self.name(place), self) if self.has(place) else None

    def operands(self) -> list[Any]:
        return [self.operand(place) for place in range(len(self.node.inputs)) if self.has(place)]

    def numbers(self, place: int) -> np.ndarray:
        """The elements of a constant operand."""
        if not self.importer.view.is_constant(self.name(place)):
            raise self.unsupported(f"its operand {self.name(place)!r} is not constant")
        return self.importer.view.constant(self.name(place))

    def whole_numbers(self, place: int) -> list[int]:
        return [int(number) for number in self.numbers(place).reshape(-1)]

    def shape(self, place: int) -> tuple[int, ...]:
        return self.importer.view.shape(self.name(place))

    def size(self, place: int = 0) -> list[Any]:
        """The size of an output as an argument: numbers, and what follows the batch as a multiple of it."""
        return self.importer.size(str(self.node.outputs[place].name))

    def result(self, place: int = 0) -> tuple[int, ...]:
        return self.importer.view.shape(str(self.node.outputs[place].name))

    def attribute(self, name: str, default: Any = None) -> Any:
        found = self.node.attributes.get(name)
        return default if found is None else found.value

    @property
    def opset(self) -> int:
        return self.importer.view.prepared.opsets.get("", 1)

    def unsupported(self, why: str) -> InputError:
        where = f"{self.node.op_type} (node {self.node.name!r}, opset {self.opset})"
        return InputError(f"{where} cannot be imported into torch: {why}")


class _Importer:
    """Translates the nodes of a view, in order, into one FX graph."""

    def __init__(self, view: OnnxGraph) -> None:
        self.view = view
        self.graph = Graph()
        self.root = nn.Module()
        self._made: dict[str, Node] = {}
        self._batch: Node | None = None
        self._projected: set[str] = set()

    def run(self) -> GraphModule:
        from attnrewrite.onnx_import_layers import LAYERS
        from attnrewrite.onnx_import_moves import MOVES
        from attnrewrite.onnx_import_ops import OPERATORS

        translations = OPERATORS | MOVES | LAYERS
        model = self.view.prepared.model
        for place, value in enumerate(real_inputs(model.graph)):
            self._made[str(value.name)] = self.graph.placeholder(f"input_{place}")
        self._size_of_batch()
        for node in model.graph:
            if not self._folds(node):
                self._translate(node, translations)
        results = tuple(self.operand(str(value.name), None) for value in model.graph.outputs)
        self.graph.output(results[0] if len(results) == 1 else results)
        module = GraphModule(self.root, self.graph)
        module.graph.eliminate_dead_code()
        module.recompile()
        return module.eval()

    def operand(self, name: str, call: Call | None) -> Node:
        if name not in self._made:
            if call is not None and name in self.view.prepared.varying:
                raise call.unsupported(f"it computes with the batch size as a number ({name!r})")
            self._made[name] = self._stored(name)
        return self._made[name]

    def size(self, name: str) -> list[Any]:
        axes = self.view.batch_axes(name)
        return [self._multiple(length) if axis in axes else length for axis, length in enumerate(self.view.shape(name))]

    def _multiple(self, length: int) -> Any:
        times = length // self.view.batch
        assert self._batch is not None
        return self._batch if times == 1 else self.graph.call_function(_times, (self._batch, times))

    def _size_of_batch(self) -> None:
        for name, node in list(self._made.items()):
            if 0 in self.view.batch_axes(name):
                self._batch = self.graph.call_function(torch.ops.aten.sym_size.int, (node, 0))
                return

    def _folds(self, node: ir.Node) -> bool:
        """Whether what a node makes is stored: constants of any batch. What is projected from constants stays, as
        the queries of a decoder do: a site is the same in both frontends."""
        names = [str(value.name) for value in node.outputs if value.name]
        self._projected.update(names if node.op_type in _PROJECTS else ())
        reads = () if node.op_type in SHAPE_ONLY else node.inputs
        if any(operand is not None and operand.name in self._projected for operand in reads):
            self._projected.update(names)
        return all(
            self.view.is_constant(name) and not self.view.batch_axes(name) and name not in self._projected
            for name in names
        )

    def _linear(self, call: Call) -> Node | None:
        """A product with a weight as the linear map it was, with the bias that is added right after."""
        value = str(call.node.outputs[0].name)
        part = self.view.biased(value)
        operation = self.view.operation(part.linear if part is not None else value)
        if operation.kind != "linear":
            return None
        tokens, weight, *biases = (self.operand(name, call) for name in operation.inputs)
        if operation.attributes["transposed"]:
            weight = call.emit(torch.permute, weight, [1, 0])
        bias = call.emit(torch.reshape, biases[0], [-1]) if biases else None
        made = call.emit(nn.functional.linear, tokens, weight, bias)
        if part is None or self.view.shape(part.product) == call.result():
            return made
        size = call.size()
        open_axes = [axis for axis, length in enumerate(size) if isinstance(length, Node)]
        if len(open_axes) == 1:
            size[open_axes[0]] = -1
        return call.emit(torch.reshape, made, size)

    def _stored(self, name: str) -> Node:
        """A constant as a parameter or a buffer of the module."""
        own = attribute_name(name)
        array = self.view.constant(name)
        tensor = torch.from_numpy(np.array(array, copy=True))
        wanted = torch_dtype(self.view.dtype(name))
        tensor = tensor.to(wanted) if tensor.dtype != wanted else tensor
        if tensor.is_floating_point() and tensor.dim():
            self.root.register_parameter(own, nn.Parameter(tensor))
        else:
            self.root.register_buffer(own, tensor)
        return self._attribute(own)

    def buffer(self, array: np.ndarray, name: str) -> Node:
        """Numbers that a translation needs, as a buffer of the module."""
        own = attribute_name(name)
        self.root.register_buffer(own, torch.from_numpy(array))
        return self._attribute(own)

    def _attribute(self, name: str) -> Node:
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            return self.graph.get_attr(name)

    def _translate(self, node: ir.Node, translations: Mapping[str, Callable[[Call], Any]]) -> None:
        call = Call(self, node)
        known = node.domain in ("", "ai.onnx", "attnrewrite", "com.microsoft")
        translation = translations.get(node.op_type) if known else None
        if translation is None:
            raise call.unsupported("no translation is known")
        for value in node.outputs:
            if value.name and not self.view.is_sized(value.name):
                raise call.unsupported("the size of its result depends on the data")
        made = self._linear(call) or translation(call)
        for place, value in enumerate(node.outputs):
            if value.name and (place == 0 or isinstance(made, list | tuple)):
                self._made[value.name] = made[place] if isinstance(made, list | tuple) else made


_PROJECTS = frozenset({"MatMul", "Gemm", "Softmax"})


def _times(size: int, times: int) -> int:
    return size * times
