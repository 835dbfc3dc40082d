"""The concrete size of every value of an ONNX graph, for one size of its inputs.

Each node is asked on its own: onnx's shape inference, given the sizes of its operands and the elements of the small
ones (the shapes that exporters compute in the graph), answers exactly where whole-graph inference gives symbols.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference.ops import load_op
from onnx.shape_inference import InferenceError, infer_node_outputs

from attnrewrite.errors import AttnRewriteError, InputError, first_line
from attnrewrite.patterns.onnx.files import schema_of
from attnrewrite.resources import require_memory

Size = tuple[int, ...]
_SMALL = 4096  # elements up to which a value may be some operand's shape
_MOST_ELEMENTS = 1 << 33
_WIDEST = 8  # bytes of an element
_FLOAT = onnx.TensorProto.FLOAT
# The first opsets that onnx's reference evaluates; what they added are types, so that older nodes mean the same.
_FIRST_WRITTEN = {"QuantizeLinear": 21, "DequantizeLinear": 21}
# com.microsoft operators that keep their first operand's size
_KEEPING = frozenset({"Gelu", "FastGelu", "BiasGelu", "QuickGelu", "BiasAdd", "SkipLayerNormalization"})
# com.microsoft's spelling of the standard's operators, for types that those lacked -> the operand of the result's type
_TYPED_BY = {"QuantizeLinear": 2, "DequantizeLinear": 1}
PRIVATE = "attnrewrite"  # the domain of the one operator that stands for every fused attention


@dataclass
class Sizes:
    """What is known of each value by name: its size (absent: it depends on the data), type, and elements if few."""

    size: dict[str, Size] = field(default_factory=dict)
    dtype: dict[str, int] = field(default_factory=dict)
    known: dict[str, np.ndarray] = field(default_factory=dict)

    def set(self, value: ir.Value, size: Sequence[int], dtype: int) -> None:
        elements = 1
        for length in size:
            elements *= length
        if elements > _MOST_ELEMENTS or any(length < 0 for length in size):
            raise InputError(f"value {value.name!r} has the size {tuple(size)}: no machine holds it; export it again")
        self.size[_name(value)] = tuple(size)
        self.dtype[_name(value)] = dtype


@contextmanager
def reading(node: ir.Node) -> Iterator[None]:
    """Tell of `node` whatever goes wrong inside: an operand or attribute that it lacks, or one of another type."""
    try:
        yield
    except (AttnRewriteError, RecursionError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"node {node.name!r} ({node.op_type}) breaks its operator's rules ({why})") from error


def input_sizes(graph: ir.Graph, batch: int, given: Mapping[str, Size] | None = None) -> dict[str, Size]:
    """The size of each input: its own where static, `given` where it says so, `batch` for an open first axis.

    Raises:
        InputError: another axis is open and not given.
    """
    result: dict[str, Size] = {}
    for value in real_inputs(graph):
        if value.shape is None:
            raise InputError(f"input {value.name!r} has no shape: give --input-size, such as 3x224x224")
        own = [length if isinstance(length, int) else None for length in value.shape]
        wanted = (given or {}).get(_name(value))
        if wanted is not None and len(wanted) == len(own):
            own = [mine if mine is not None else theirs for mine, theirs in zip(own, (None, *wanted[1:]), strict=True)]
        if own and own[0] is None:
            own[0] = batch
        if None in own:
            axis = own.index(None)
            raise InputError(f"input {value.name!r} leaves axis {axis} open: give --input-size, such as 3x224x224")
        result[_name(value)] = tuple(length for length in own if length is not None)
    return result


def real_inputs(graph: ir.Graph) -> list[ir.Value]:
    """The inputs that a caller must give: those without an initialiser."""
    return [value for value in graph.inputs if not value.is_initializer()]


def start(graph: ir.Graph, inputs: Mapping[str, Size]) -> Sizes:
    """Sizes of the inputs and initialisers."""
    sizes = Sizes()
    for value in real_inputs(graph):
        sizes.set(value, inputs[_name(value)], int(value.dtype or _FLOAT))
    for value in graph.initializers.values():
        _add_tensor(sizes, value, value.const_value)
    return sizes


def advance(sizes: Sizes, node: ir.Node, opsets: Mapping[str, int]) -> None:
    """Add what one node makes, its operands being known.

    Raises:
        InputError: the node cannot take operands of these sizes or types.
    """
    if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
        _add_tensor(sizes, node.outputs[0], constant_tensor(node))
        return
    if any(operand is not None and _name(operand) not in sizes.size for operand in node.inputs):
        return
    if node.domain == PRIVATE or node.domain == "com.microsoft":
        _foreign(sizes, node)
        if node.op_type in _TYPED_BY:
            _evaluate_small(sizes, node, opsets)
        return
    if any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
        return
    for value, made in zip(node.outputs, _infer(sizes, node, opsets), strict=True):
        if made is not None and value.name:
            sizes.set(value, *made)
    _evaluate_small(sizes, node, opsets)


def constant_tensor(node: ir.Node) -> ir.TensorProtocol | None:
    """What a Constant node holds; None for what is no tensor (a string, a sparse tensor)."""
    for name, attribute in node.attributes.items():
        if name == "value":
            return attribute.value
        if name in ("value_float", "value_int", "value_floats", "value_ints"):
            dtype = np.float32 if "float" in name else np.int64
            return ir.tensor(np.array(attribute.value, dtype=dtype))
    return None


def evaluate(node: ir.Node, arrays: Sequence[np.ndarray | None], opsets: Mapping[str, int]) -> list[np.ndarray]:
    """The outputs of one node on arrays, by the operator's reference implementation.

    Raises:
        InputError: there is none, or it refuses the arrays.
    """
    if node.op_type == "ScatterND" and "reduction" not in node.attributes:
        return [_scattered(*arrays)]  # type: ignore[arg-type]
    try:
        version = max(opsets.get(node.domain, 1), _FIRST_WRITTEN.get(node.op_type, 1))
        run = load_op("" if node.op_type in _TYPED_BY else node.domain, node.op_type, version)
        attributes = {name: _plain(attribute) for name, attribute in node.attributes.items()}
        result = run.eval(*arrays, n_outputs=len(node.outputs), **attributes)
    except Exception as error:  # reference implementations raise what numpy raises
        raise InputError(f"node {node.name!r} ({node.op_type}) cannot be evaluated: {first_line(error)}") from error
    return [np.asarray(array) for array in (result if isinstance(result, tuple) else (result,))]


def computed(
    value: ir.Value, known: Mapping[str, np.ndarray], sizes: Sizes, opsets: Mapping[str, int]
) -> np.ndarray | None:
    """The elements of a value, evaluated with all that it is made of that is not `known` by name; None where that is no
    constant. Without recursion: graphs may be long.

    Raises:
        InputError: it is made by an operator that cannot be evaluated, or whose result memory has no room for.
    """
    memory: dict[str, np.ndarray] = {}

    def stored(each: ir.Value) -> np.ndarray | None:
        name = _name(each)
        if name in memory or name in known:
            return memory[name] if name in memory else known[name]
        return None if each.const_value is None else each.const_value.numpy()

    pending = [value]
    while pending:
        array, node = stored(pending[-1]), pending[-1].producer()
        if array is None and (node is None or not is_function_of_operands(node)):
            return None
        if array is None and node is not None:
            missing = [operand for operand in node.inputs if operand is not None and stored(operand) is None]
            if missing:
                pending += missing
                continue
            arrays = [None if operand is None else stored(operand) for operand in node.inputs]
            _require_memory(node, sizes)
            for output, made in zip(node.outputs, evaluate(node, arrays, opsets), strict=False):
                memory[_name(output)] = made
        pending.pop()
    return stored(value)


def _require_memory(node: ir.Node, sizes: Sizes) -> None:
    """Raise InputError where memory has no room for what a node makes: a few stored numbers may ask for any length."""
    count = sum(math.prod(sizes.size.get(output.name or "", ())) for output in node.outputs)
    what = f"node {node.name!r} ({node.op_type}), which makes {count:,} elements,"
    require_memory(_WIDEST * count, what, "no model needs such a constant: export it again")


def is_function_of_operands(node: ir.Node) -> bool:
    """Whether nothing else decides what a node makes: no drawn number, and no graph inside of it."""
    drawn = node.op_type.startswith("Random") or node.op_type in ("Multinomial", "Bernoulli")
    return not drawn and all(each.type != ir.AttributeType.GRAPH for each in node.attributes.values())


def _scattered(data: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
    """ScatterND at once: the reference implementation takes the elements one by one."""
    result = np.array(data)
    result[tuple(np.moveaxis(indices, -1, 0))] = updates
    return result


def _plain(attribute: ir.Attr) -> object:
    if attribute.type == ir.AttributeType.TENSOR:
        return ir.serde.serialize_tensor(attribute.as_tensor())
    return list(attribute.value) if isinstance(attribute.value, tuple) else attribute.value


def _name(value: ir.Value) -> str:
    assert value.name is not None
    return value.name


def _add_tensor(sizes: Sizes, value: ir.Value, tensor: ir.TensorProtocol | None) -> None:
    if tensor is None:
        return
    sizes.set(value, tensor.shape.numpy(), int(tensor.dtype))
    if tensor.size <= _SMALL and tensor.dtype != ir.DataType.STRING:
        sizes.known[_name(value)] = tensor.numpy()


def _foreign(sizes: Sizes, node: ir.Node) -> None:
    """Operators outside the standard whose sizes follow from their operands."""
    first = sizes.size[_name(node.inputs[0])] if node.inputs and node.inputs[0] is not None else None
    if first is None:
        return
    if node.domain == PRIVATE:
        value = node.inputs[2]
        assert value is not None
        first = (*first[:-1], sizes.size[_name(value)][-1])
    elif node.op_type not in (*_KEEPING, *_TYPED_BY):
        return
    place_of_type = _TYPED_BY.get(node.op_type, 0)
    typed_by = node.inputs[place_of_type] if place_of_type < len(node.inputs) else None
    dtype = int(onnx.TensorProto.UINT8) if typed_by is None else sizes.dtype[_name(typed_by)]
    for place, output in enumerate(node.outputs):
        if not output.name:
            continue
        if node.op_type == "SkipLayerNormalization" and place in (1, 2):  # the mean and the deviation of each token
            sizes.set(output, (*first[:-1], 1), _FLOAT)
        else:
            sizes.set(output, first, dtype)


def _infer(sizes: Sizes, node: ir.Node, opsets: Mapping[str, int]) -> Iterable[tuple[Size, int] | None]:
    domain = "" if node.domain == "ai.onnx" else node.domain
    version = opsets.get(domain, opsets.get("ai.onnx", 1) if not domain else 1)
    schema = schema_of(node.op_type, version, domain)
    if schema is None:
        return [None] * len(node.outputs)
    names = [_name(operand) for operand in node.inputs if operand is not None]
    types = {name: onnx.helper.make_tensor_type_proto(sizes.dtype[name], sizes.size[name]) for name in names}
    data = {name: onnx.numpy_helper.from_array(sizes.known[name], name) for name in names if _is_size_like(sizes, name)}
    try:
        imports = [onnx.helper.make_opsetid(domain, version)]
        made = infer_node_outputs(schema, ir.serde.serialize_node(node), types, data, opset_imports=imports)
        found = [_concrete(made.get(value.name or "")) for value in node.outputs]
        if node.op_type == "Reshape" and found[0] is not None:
            _require_as_many(sizes.size[names[0]], found[0][0])
    except (InferenceError, RuntimeError, onnx.checker.ValidationError) as error:
        sized = ", ".join(f"{name} {'x'.join(map(str, sizes.size[name])) or 'scalar'}" for name in names)
        where = f"node {node.name!r} ({node.op_type})"
        way_out = "export it again, where torch wrote it with dynamo=True"  # its older one spoils repeat_interleave
        raise InputError(f"{where} does not take its operands ({sized}): {_reason(error)}; {way_out}") from error
    return found


def _require_as_many(size: Size, wanted: Size) -> None:
    """Raise InferenceError where `wanted` holds another number of elements, which onnx does not look at."""
    if math.prod(size) != math.prod(wanted):
        raise InferenceError(f"{math.prod(size)} elements are not {'x'.join(map(str, wanted)) or 'a scalar'}")


def _reason(error: BaseException) -> str:
    text = first_line(error)
    return text.rpartition("] ")[2] or text


def _is_size_like(sizes: Sizes, name: str) -> bool:
    """Whether an operand's elements may decide a size: few, and of a plain type."""
    return name in sizes.known and sizes.known[name].size <= 64 and sizes.known[name].dtype.kind in "iufb"


def _concrete(made: onnx.TypeProto | None) -> tuple[Size, int] | None:
    if made is None or not made.HasField("tensor_type") or not made.tensor_type.HasField("shape"):
        return None
    dims = made.tensor_type.shape.dim
    if any(not dim.HasField("dim_value") for dim in dims):
        return None
    return tuple(int(dim.dim_value) for dim in dims), made.tensor_type.elem_type


def _evaluate_small(sizes: Sizes, node: ir.Node, opsets: Mapping[str, int]) -> None:
    """Compute what is small and follows from sizes and small constants alone."""
    output = node.outputs[0]
    if node.op_type == "Shape":
        bounds = slice(
            *(node.attributes[name].as_int() if name in node.attributes else None for name in ("start", "end"))
        )
        sizes.known[_name(output)] = np.array(sizes.size[_name(node.inputs[0])][bounds], np.int64)  # type: ignore[arg-type]
        return
    if node.op_type == "Size":
        sizes.known[_name(output)] = np.array(np.prod(sizes.size[_name(node.inputs[0])], dtype=np.int64))  # type: ignore[arg-type]
        return
    known = all(operand is None or _name(operand) in sizes.known for operand in node.inputs)
    if not known or not is_function_of_operands(node):
        return
    if any(np.prod(sizes.size.get(value.name or "", (0,)), dtype=np.int64) > _SMALL for value in node.outputs):
        return
    arrays = [None if operand is None else sizes.known[_name(operand)] for operand in node.inputs]
    try:
        results = evaluate(node, arrays, opsets)
    except InputError:
        return
    for value, array in zip(node.outputs, results, strict=False):
        if value.name:
            sizes.known[value.name] = array
            if value.name not in sizes.size:
                sizes.set(value, array.shape, int(ir.DataType.from_numpy(array.dtype)))
