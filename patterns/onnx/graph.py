"""ONNX graphs (onnx_ir) behind the GraphView protocol. No torch."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from attnrewrite.errors import InputError
from attnrewrite.patterns.graph import Operation
from attnrewrite.patterns.matcher import scan
from attnrewrite.patterns.onnx.normalise import moved, normalise
from attnrewrite.patterns.onnx.operators import SHAPE_ONLY
from attnrewrite.patterns.onnx.prepare import prepare
from attnrewrite.patterns.onnx.quantised import Rounding, as_pairs, inner_roundings, without
from attnrewrite.patterns.onnx.recognise import BiasedProduct, biased_product, scope_of
from attnrewrite.patterns.onnx.sizes import Size, computed, evaluate, is_function_of_operands, reading
from attnrewrite.patterns.softmaxes import softmax_by_hand
from attnrewrite.site import Frontend, Scan

_RESULT = "result of the model: "  # stands for the reader of a graph output among a value's users
_WORTH_KEEPING = 1 << 16  # elements up to which a computed constant is remembered


class OnnxGraph:
    """A model, with the sizes that a batch of two gives it where its batch is open.

    `input_sizes` gives what the inputs leave open beyond the batch, by input name. What is quantised inside an
    attention is read in float: `source` is the model that is shown, without the `roundings` of `quantised`; `rounded`
    has them by the value that the attention's anchor makes.

    Raises:
        InputError: the graph is cyclic, a node does not take its operands, or an open axis is not given.
    """

    frontend: Frontend = "onnx"

    def __init__(self, model: ir.Model, input_sizes: Mapping[str, Size] | None = None) -> None:
        self.source = self.quantised = as_pairs(model)
        self._read(input_sizes)
        self.rounded = inner_roundings(self, self.source)
        if self.roundings:
            self.source = without(self.quantised, self.roundings)
            self._read(input_sizes)

    @property
    def roundings(self) -> tuple[Rounding, ...]:
        """The pairs inside attentions, each once."""
        return tuple(dict.fromkeys(each for own in self.rounded.values() for each in own))

    def _read(self, input_sizes: Mapping[str, Size] | None) -> None:
        self.prepared = prepare(self.source, input_sizes)
        self._sizes = self.prepared.sizes
        self._values = {str(value.name): value for value in _named_values(self.prepared.model.graph)}
        self._is_constant: dict[str, bool] = {}
        self._operations: dict[str, Operation] = {}
        self._constants: dict[str, np.ndarray] = {}
        for name, value in self._values.items():
            self._is_constant[name] = self._value_is_constant(value)
        self._biased: dict[str, BiasedProduct] = {}
        self._by_linear: dict[str, BiasedProduct] = {}
        found = (biased_product(node, self) for node in self.prepared.model.graph)
        parts = [part for part in found if part is not None]
        self._biased = {part.total: part for part in parts}
        self._by_linear = {part.linear: part for part in self._biased.values()}
        self._read_as = {part.product: part.linear for part in self._biased.values()}
        self.values = self._shown()

    def _shown(self) -> tuple[str, ...]:
        """Every value whose size is known; a product whose bias is added right after is shown with it."""
        hidden = {name for part in self._biased.values() for name in part.hidden}
        shown: list[str] = []
        for name in self._values:
            if name in self._biased and self._biased[name].linear != name:
                shown.append(self._biased[name].linear)
            if name in self._sizes.size and name not in hidden:
                shown.append(name)
        return tuple(shown)

    def operation(self, value: str) -> Operation:
        if value not in self._operations:
            self._operations[value] = self._normalise(value)  # as it is, for its readers, which are asked next
            self._operations[value] = softmax_by_hand(self, self._operations[value])
        return self._operations[value]

    def shape(self, value: str) -> Size:
        return self._sizes.size[self._sized(value)]

    def batch_axes(self, value: str) -> frozenset[int]:
        return self.prepared.batch_axes.get(self._sized(value), frozenset())

    def _sized(self, value: str) -> str:
        """The value of the file that has the size of `value`. Raises InputError where none is known."""
        if value in self._sizes.size:
            return value
        if value not in self._by_linear:
            raise InputError(f"the size of {value!r} cannot be inferred: export the model again")
        return self._by_linear[value].product

    @property
    def batch(self) -> int:
        """The batch that open axes are read with."""
        return self.prepared.batch

    def dtype(self, value: str) -> int:
        """The element type of a value, as ONNX numbers them."""
        return self._sizes.dtype[value]

    def is_boolean(self, value: str) -> bool:
        return self._sizes.dtype.get(value) == ir.DataType.BOOL

    def biased(self, value: str) -> BiasedProduct | None:
        """The linear map that ends in a value by the addition of its bias."""
        return self._biased.get(value)

    def maker(self, value: str) -> ir.Node | None:
        """The node that makes a value; of a product that is read with its bias, the product's."""
        part = self._by_linear.get(value)
        found = self._values.get(value if part is None else part.product)
        return None if found is None else found.producer()

    def users(self, value: str) -> tuple[str, ...]:
        if value not in self._values:
            return (self._by_linear[value].total,) if value in self._by_linear else ()
        source = self._values[value]
        found = [_RESULT + value] if source.is_graph_output() else []
        for node in source.consumers():
            if node.op_type in SHAPE_ONLY:
                continue
            rounds = node.op_type == "DynamicQuantizeLinear"  # its scale and zero point follow its integers
            made = node.outputs[:1] if rounds else node.outputs
            names = [str(output.name) for output in made if output.name]
            known = [self._read_as.get(name, name) for name in names if name in self._sizes.size]
            found += known or [_RESULT + name for name in names]
        return tuple(dict.fromkeys(found))

    def is_sized(self, value: str) -> bool:
        """Whether the size of a value is known: it does not depend on the data."""
        return value in self._sizes.size

    def is_constant(self, value: str) -> bool:
        return self._is_constant.get(value, False)

    def is_stored(self, value: str) -> bool:
        """Whether a constant is an initialiser, as it stands, cast, with its axes moved, or of integers: a weight."""
        operation = self.operation(value)
        while (operation.kind == "move" or operation.name in ("dequantize", "identity")) and len(operation.inputs) == 1:
            operation = self.operation(operation.inputs[0])
        return operation.kind == "constant"

    def scope(self, value: str) -> str:
        node = self._values[value].producer() if value in self._values else None
        return scope_of(node) if node is not None else ""

    def title(self, value: str) -> str:
        return value

    def constant(self, value: str) -> np.ndarray:
        """The elements of a constant; half precision as float32.

        Raises:
            InputError: it is computed by an operator that cannot be evaluated.
        """
        known = ChainMap(self._constants, self._sizes.known)
        array = computed(self._values[value], known, self._sizes, self.prepared.opsets)
        assert array is not None, f"{value} is a constant"
        if array.size <= _WORTH_KEEPING:
            self._constants[value] = array
        return array.astype(np.float32) if array.dtype.name in ("float16", "bfloat16") else array

    def move(self, value: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
        if value in self._biased:
            return arrays[0].reshape(self.shape(value))
        output = self._values[value]
        node = output.producer()
        assert node is not None
        given = dict(zip(moved(node), arrays, strict=True))
        filled = [given.get(place, self._parameter(node, place)) for place in range(len(node.inputs))]
        return evaluate(node, filled, self.prepared.opsets)[output.index() or 0]

    def _parameter(self, node: ir.Node, place: int) -> np.ndarray | None:
        """What a movement reads beside the data; what it pads with becomes 0."""
        operand = node.inputs[place]
        if operand is None or place in moved(node):
            return None
        is_padding = node.op_type == "Pad" and place == 2
        return np.zeros((), np.int64) if is_padding else self.constant(str(operand.name))

    def _value_is_constant(self, value: ir.Value) -> bool:
        node = value.producer()
        if node is None:
            return value.is_initializer()
        if node.op_type in SHAPE_ONLY:
            return node.inputs[0] is not None and node.inputs[0].name in self._sizes.size
        operands = [str(operand.name) for operand in node.inputs if operand is not None]
        return is_function_of_operands(node) and all(self._is_constant[operand] for operand in operands)

    def _normalise(self, value: str) -> Operation:
        if value.startswith(_RESULT) and value not in self._values:
            return Operation(value, "other", "output", ())
        part = self._biased.get(value)
        if part is not None and part.linear != value:
            return Operation(value, "move", "reshape", (part.linear,))
        part = self._by_linear.get(value)
        if part is not None:
            return Operation(value, "linear", "linear", (part.tokens, part.weight, part.bias), {"transposed": True})
        node = self._values[value].producer()
        if node is None:
            return Operation(value, "constant" if self._values[value].is_initializer() else "input", "input", ())
        with reading(node):
            return normalise(self, value, node)


def scan_onnx(graph: OnnxGraph, model: str) -> Scan:
    """Every attention of an ONNX graph; what the view cannot show among the near misses.

    Raises:
        InputError: data is moved through more steps than can be followed.
    """
    try:
        found = scan(graph, model)
    except RecursionError as error:
        raise InputError(f"{model} moves its data through too many steps to follow; simplify it") from error
    return replace(found, near_misses=(*found.near_misses, *graph.prepared.unread))


def _named_values(graph: ir.Graph) -> list[ir.Value]:
    """Inputs, initialisers and what nodes make, producers first."""
    made = [value for node in graph for value in node.outputs if value.name]
    return [*graph.inputs, *(v for v in graph.initializers.values() if not v.is_graph_input()), *made]
