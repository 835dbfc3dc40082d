"""ONNX -> FX: an ONNX model as a torch module, so that it can be calibrated, and reach targets that read no ONNX.

Constants are folded first, and what exporters compute of shapes with them: a reshape becomes its sizes, the batch left
open. Every operator that is translated is in `arithmetic`, `movement` and `layers`.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from keyword import iskeyword
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from attnrewrite.errors import CheckFailedError, InputError, first_line
from attnrewrite.frontends.onnx.arithmetic import OPERATORS
from attnrewrite.frontends.onnx.call import Call, Translation, torch_dtype
from attnrewrite.frontends.onnx.compared import LITTLE, allowed_difference, beyond_rounding, run
from attnrewrite.frontends.onnx.layers import LAYERS
from attnrewrite.frontends.onnx.movement import MOVES
from attnrewrite.frontends.onnx.quantised import INTEGERS
from attnrewrite.frontends.onnx.quantised import QUANTISED as ROUNDINGS
from attnrewrite.patterns.onnx.graph import OnnxGraph
from attnrewrite.patterns.onnx.operators import SHAPE_ONLY, unreadable
from attnrewrite.patterns.onnx.recognise import attribute_name
from attnrewrite.patterns.onnx.sizes import reading, real_inputs

# Whole numbers that name no row of a table, tried until the model has an answer: any; a mask's; one's that keeps all.
NUMBERS = range(128), range(2), range(1, 2)
FURTHER = range(1, 3)  # the seeds of more inputs, for an import that is off by LITTLE or less on the first

TRANSLATIONS: Mapping[str, Translation] = OPERATORS | MOVES | LAYERS | ROUNDINGS


def import_graph(graph: OnnxGraph) -> tuple[GraphModule, tuple[Tensor, ...]]:
    """`graph` as a torch module, and inputs that it runs on; checked against onnxruntime on these and, where the batch
    is open, on one image more: what holds the batch as a number is right with the one that the graph was read with.

    Parameters are named by `attribute_name` of the initialisers.

    Raises:
        InputError: an operator is not translated (named, with its node and opset), a weight holds NaN, the model has no
            number for an answer, or onnxruntime is not installed.
        CheckFailedError: the module differs from onnxruntime by more than `allowed_difference`.
    """
    _require_numbers(graph.source)
    module = _Importer(graph).run()
    inputs, numbers = _answered(graph, module)
    if graph.prepared.open_batch:
        _compared(graph, module, numbers, graph.prepared.batch + 1)
    return module, inputs


def _answered(graph: OnnxGraph, module: GraphModule) -> tuple[tuple[Tensor, ...], range]:
    """Inputs that the model has an answer for, which the module has been compared on, and their whole numbers."""
    *first, last = NUMBERS
    for numbers in first:
        with suppress(InputError):
            return _compared(graph, module, numbers), numbers
    return _compared(graph, module, last), last


def _compared(graph: OnnxGraph, module: GraphModule, numbers: range, batch: int | None = None) -> tuple[Tensor, ...]:
    """Random inputs on which the module gives what onnxruntime does.

    Where it is off by little, all of some others are to be right: what an ill-conditioned model makes of rounding is as
    large on few inputs, and by chance larger in onnxruntime than in the module.
    """
    inputs, *others = (example_inputs(graph, numbers, batch, seed) for seed in (0, *FURTHER))
    error = _beyond_rounding(graph, module, inputs)
    if not error or (error <= LITTLE and not any(_beyond_rounding(graph, module, other) for other in others)):
        return inputs
    _require_an_answer(graph.source, inputs)
    raise CheckFailedError(
        f"the imported model differs from onnxruntime by {error:.2e} "
        f"(allowed {allowed_difference(graph.source):.0e}); please report it"
    )


def _beyond_rounding(graph: OnnxGraph, module: GraphModule, inputs: tuple[Tensor, ...]) -> float:
    """How far the module is from onnxruntime, where that is more than is allowed and than rounding explains; else 0."""
    try:
        return beyond_rounding(graph.source, module, inputs, allowed_difference(graph.source))
    except (RuntimeError, IndexError) as fault:  # what torch raises where the module does not take them
        told = f"the imported model does not take a batch of {len(inputs[0])} ({first_line(fault)})"
        raise CheckFailedError(f"{told}; please report it") from fault


def _require_numbers(model: ir.Model) -> None:
    for name, value in model.graph.initializers.items():
        stored = value.const_value
        if stored is not None and stored.dtype.is_floating_point() and bool(np.isnan(stored.numpy()).any()):
            raise InputError(f"weight {name} holds NaN: the file is damaged, or training diverged")


def _require_an_answer(model: ir.Model, inputs: tuple[Tensor, ...]) -> None:
    if not any(bool(result.isfinite().any()) for result in run(model, inputs)):
        raise InputError(
            "the model answers random inputs with NaN or infinity alone, in onnxruntime as in torch: its weights are "
            "damaged, training diverged, or a mask drops all that it looks at"
        )


def example_inputs(
    graph: OnnxGraph, numbers: range = NUMBERS[0], batch: int | None = None, seed: int = 0
) -> tuple[Tensor, ...]:
    """Random inputs of the graph's sizes, of so many images where its batch is open (None: as it was read): normal
    numbers, bytes, truths, or whole numbers: of `numbers`, or as many as a table has rows.

    No row of truths is all true or all false: a mask that drops every key would leave a query without an answer.
    """
    generator, images = torch.Generator().manual_seed(seed), batch or graph.prepared.batch
    found = []
    for value in real_inputs(graph.prepared.model.graph):
        name = str(value.name)
        size = [
            length // graph.prepared.batch * images if axis in graph.batch_axes(name) else length
            for axis, length in enumerate(graph.shape(name))
        ]
        dtype = torch_dtype(graph.dtype(name))
        if dtype.is_floating_point:
            found.append(torch.randn(size, generator=generator, dtype=torch.float32).to(dtype))
            continue
        rows = list(_rows_looked_up(graph, value))
        truths = range(2) if dtype == torch.bool or _only_truths_are_read(value) else None
        own = truths or (range(256) if dtype == torch.uint8 else range(min([128, *rows])) if rows else numbers)
        found.append(torch.randint(own.start, own.stop, size, generator=generator).to(dtype))
        if own == range(2) and size and size[-1] > 1:
            found[-1][..., 0], found[-1][..., -1] = 1, 0
    return tuple(found)


def _only_truths_are_read(value: ir.Value) -> bool:
    """Whether all that is asked of a value's numbers is which are zero, as of a mask."""
    readers = [node for node, _ in value.uses()]
    return bool(readers) and all(
        node.attributes.get_int("to", 0) == ir.DataType.BOOL
        or (node.op_type in _SAME_NUMBERS | {"Concat"} and _only_truths_are_read(node.outputs[0]))
        for node in readers
    )


def _rows_looked_up(graph: OnnxGraph, value: ir.Value) -> Iterator[int]:
    """The lengths of what is read at the places that a value's numbers name, as token numbers name rows of a table."""
    for node, place in value.uses():
        if node.op_type == "Gather" and place == 1 and node.inputs[0] is not None:
            yield graph.shape(str(node.inputs[0].name))[node.attributes.get_int("axis", 0)]
        elif node.op_type in _SAME_NUMBERS and place == 0:
            yield from _rows_looked_up(graph, node.outputs[0])


_SAME_NUMBERS = frozenset({"Cast", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"})


def _argument(name: str, place: int) -> str:
    """What an input is called in Python: as in the file, where that is a name there."""
    plain = name.isidentifier() and not iskeyword(name) and name != "self" and not name.startswith("_")
    return name if plain else f"input_{place}"


class _Importer:
    """Translates the nodes of a view, in order, into one FX graph."""

    def __init__(self, view: OnnxGraph) -> None:
        self.view = view
        self.graph = Graph()
        self.root = nn.Module()
        self._made: dict[str, Node] = {}
        self._batch: Node | None = None
        self._projected: set[str] = set()
        self._folded = frozenset(node for node in view.prepared.model.graph if self._folds(node))

    def run(self) -> GraphModule:
        model = self.view.prepared.model
        for place, value in enumerate(real_inputs(model.graph)):
            self._made[str(value.name)] = self.graph.placeholder(_argument(str(value.name), place))
        self._size_of_batch()
        for node in model.graph:
            if node not in self._folded:
                self._translate(node)
        results = tuple(self._result(str(value.name)) for value in model.graph.outputs)
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

    def is_constant(self, name: str) -> bool:
        """Whether a value is a constant in the module, too: what is projected from constants is computed there."""
        return self.view.is_constant(name) and name not in self._projected

    def _result(self, name: str) -> Node:
        made, kind = self.operand(name, None), self.view.dtype(name)
        return self.graph.call_method("to", (made, torch_dtype(kind))) if kind in INTEGERS else made

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
        return all(self.is_constant(name) and not self.view.batch_axes(name) for name in names)

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
        """A constant as a parameter of the module, where the file could store another in its place, else as a buffer.
        Another would change the constants that are made of it: exporters store equal tensors once, behind an Identity.
        """
        own = attribute_name(name)
        array = self.view.constant(name)
        tensor = torch.from_numpy(np.array(array, copy=True))
        wanted = torch_dtype(self.view.dtype(name))
        tensor = tensor.to(wanted) if tensor.dtype != wanted else tensor
        value = self.view.prepared.model.graph.initializers.get(name)
        own_alone = value is not None and not any(reader in self._folded for reader, _ in value.uses())
        if tensor.is_floating_point() and tensor.dim() and own_alone:
            self.root.register_parameter(own, nn.Parameter(tensor))
        else:
            self.root.register_buffer(own, tensor)
        return self._attribute(own)

    def buffer(self, array: np.ndarray, name: str) -> Node:
        """Numbers that a translation needs, as a buffer of the module."""
        own = attribute_name(name)
        self.root.register_buffer(own, torch.from_numpy(array.copy()))  # a stored one may be read only
        return self._attribute(own)

    def _attribute(self, name: str) -> Node:
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            return self.graph.get_attr(name)

    def _translate(self, node: ir.Node) -> None:
        call = Call(self, node)
        known = node.domain in ("", "ai.onnx", "attnrewrite", "com.microsoft")
        translation = TRANSLATIONS.get(node.op_type) if known else None
        if translation is None:
            raise call.unsupported(str(unreadable(node.domain, node.op_type) or "no translation is known"))
        for value in node.outputs:
            if value.name and not self.view.is_sized(value.name):
                raise call.unsupported("the size of its result depends on the data")
        with reading(node):
            made = self._linear(call) or translation(call)
        results = made if isinstance(made, list | tuple) else (made,)
        for value, result in zip_longest(node.outputs, results):
            if result is not None and value is not None and value.name:
                self._made[value.name] = result
            elif result is None and value is not None and (value.uses() or value.is_graph_output()):
                raise call.unsupported(f"its output {value.name!r} is read")


_PROJECTS = frozenset({"MatMul", "Gemm", "Softmax"})


def _times(size: int, times: int) -> int:
    return size * times
