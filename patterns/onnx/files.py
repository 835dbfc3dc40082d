"""Reading ONNX files that others wrote: refused in one line where they are damaged, or reach outside their folder."""

import functools
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from attnrewrite.errors import InputError, first_line


def read_model(path: Path) -> ir.Model:
    """The model in an ONNX file, its external data checked but not yet read.

    Raises:
        InputError: the file is no ONNX model, is cut short, contradicts itself, or points outside its folder.
    """
    try:
        proto = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); give an .onnx file") from error
    except (DecodeError, ValueError) as error:
        raise InputError(f"{path}: not an ONNX model, or cut short; export it again") from error
    if not proto.HasField("graph") or not proto.graph.node:
        raise InputError(f"{path}: holds no graph; export it again")
    for initialiser in proto.graph.initializer:
        _check_stored(f"{path}: initialiser {initialiser.name!r}", initialiser)
    opsets = {_domain(opset.domain): opset.version for opset in proto.opset_import}
    for node in proto.graph.node:
        _check_node(path, node, opsets)
    try:
        with quiet_ir():
            model = ir.serde.deserialize_model(proto)
    except Exception as error:  # onnx_ir raises many kinds
        raise InputError(f"{path}: not a sound ONNX model: {_innermost(error)}") from error
    for tensor in _tensors(model):
        _check_external(path, tensor)
    ir.external_data.set_base_dir(model.graph, path.resolve().parent)
    check_wired(model, str(path))
    return model


def check_wired(model: ir.Model, name: str) -> None:
    """Raise InputError where a node reads what nothing makes, or two values have one name."""
    made: set[str] = set()
    graph = model.graph
    stored = [value for value in graph.initializers.values() if not value.is_graph_input()]
    for value in (*graph.inputs, *stored, *(value for node in graph for value in node.outputs)):
        if value.name and value.name in made:
            raise InputError(f"{name}: two values are named {value.name!r}; export it again")
        made.add(value.name or "")
    for node in graph:
        for operand in node.inputs:
            if operand is not None and operand.name not in made:
                where = f"{name}: node {node.name!r} ({node.op_type})"
                raise InputError(f"{where} reads {operand.name!r}, which nothing makes; export it again")
    for result in graph.outputs:
        if result.name not in made:
            raise InputError(f"{name}: nothing makes its output {result.name!r}; export it again")


def _check_stored(what: str, tensor: onnx.TensorProto) -> None:
    """Whether a tensor inside the file has as many bytes, or numbers, as its dimensions say."""
    if any(length < 0 for length in tensor.dims):
        raise InputError(f"{what} has a negative dimension; export it again")
    if tensor.data_type == onnx.TensorProto.UNDEFINED:
        raise InputError(f"{what} has no type; export it again")
    if tensor.data_type not in ir.DataType._value2member_map_ or tensor.data_type == onnx.TensorProto.STRING:
        return
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return
    if tensor.HasField("raw_data"):
        bits = ir.DataType(tensor.data_type).bitwidth
        wanted, found = -(-math.prod(tensor.dims) * bits // 8), len(tensor.raw_data)
        if wanted != found:
            said = f"{what} has {found} bytes, its dimensions {list(tensor.dims)} need {wanted}"
            raise InputError(f"{said}; export it again")
        return
    try:
        onnx.checker.check_tensor(tensor)
    except onnx.checker.ValidationError as error:
        said = f"{what} does not hold the numbers that its dimensions {list(tensor.dims)} need"
        raise InputError(f"{said} ({first_line(error)}); export it again") from error


def _check_node(path: Path, node: onnx.NodeProto, opsets: Mapping[str, int]) -> None:
    """Whether it has as many operands and results as its operator, and each attribute once and of a type: of two,
    readers take different ones.
    """
    where = f"{path}: node {node.name!r} ({node.op_type})"
    schema = schema_of(node.op_type, opsets.get(_domain(node.domain), 0), _domain(node.domain))
    if schema is not None:
        for what, given, least, most in (
            ("inputs", node.input, schema.min_input, schema.max_input),
            ("outputs", node.output, schema.min_output, schema.max_output),
        ):
            if not least <= len(given) <= most:
                wanted = f"at least {least}" if most > len(given) else f"at most {most}"
                raise InputError(f"{where} has {len(given)} {what}, and its operator {wanted}; export it again")
    seen: set[str] = set()
    for attribute in node.attribute:
        if attribute.name in seen:
            raise InputError(f"{where} has the attribute {attribute.name!r} twice; export it again")
        if attribute.type == onnx.AttributeProto.UNDEFINED:
            raise InputError(f"{where} has an attribute {attribute.name!r} of no type; export it again")
        seen.add(attribute.name)
        if attribute.type == onnx.AttributeProto.TENSOR:
            _check_stored(f"{where}: its {attribute.name}", attribute.t)
        for inner in (attribute.g, *attribute.graphs):
            for initialiser in inner.initializer:
                _check_stored(f"{where}: initialiser {initialiser.name!r}", initialiser)
            for each in inner.node:
                _check_node(path, each, opsets)


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


@functools.cache
def schema_of(operator: str, version: int, domain: str) -> onnx.defs.OpSchema | None:
    """What ONNX says of an operator; None of those that are not its own."""
    try:
        return onnx.defs.get_schema(operator, version, domain)
    except (onnx.defs.SchemaError, TypeError):  # the latter of a version that takes more than 32 bits
        return None


def _check_external(path: Path, tensor: ir.ExternalTensor) -> None:
    what, folder = f"{path}: tensor {tensor.name!r}", path.resolve().parent
    where = (folder / tensor.location).resolve()
    if Path(tensor.location).is_absolute() or not where.is_relative_to(folder):
        raise InputError(f"{what} points outside the model's folder ({tensor.location}); it was not read")
    if not where.is_file():
        raise InputError(f"{what} is stored in {tensor.location}, which is not there; put it beside the model")
    end = (tensor.offset or 0) + (tensor.length if tensor.length is not None else tensor.nbytes)
    if (tensor.offset or 0) < 0 or tensor.nbytes > (tensor.length or tensor.nbytes) or end > where.stat().st_size:
        raise InputError(f"{what} lies beyond the end of {tensor.location}; copy the file again")


def _tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Every tensor that is stored beside the model, wherever it is referred to."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value
        for node in graph:
            yield from _attribute_tensors(node)
    for function in model.functions.values():
        for node in ir.traversal.RecursiveGraphIterator(function.graph):
            yield from _attribute_tensors(node)


def _attribute_tensors(node: ir.Node) -> Iterator[ir.ExternalTensor]:
    for attribute in node.attributes.values():
        held = {ir.AttributeType.TENSOR: [attribute.value], ir.AttributeType.TENSORS: attribute.value}
        for tensor in held.get(attribute.type, ()):
            if isinstance(tensor, ir.ExternalTensor):
                yield tensor


@contextmanager
def quiet_ir() -> Iterator[None]:
    """onnx_ir remarks on what it mends; what it cannot mend is told as an error."""
    logger = logging.getLogger("onnx_ir")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _innermost(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
