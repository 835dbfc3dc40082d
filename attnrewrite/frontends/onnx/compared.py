"""An ONNX model in onnxruntime, and a torch module held to it."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from attnrewrite.errors import InputError, first_line
from attnrewrite.passes.roundings import FromRounding, laid_out, matter, roundings, step_name
from attnrewrite.passes.verify import HALF, HALF_STEPS, relative_error
from attnrewrite.passes.wide import Recording, Wide
from attnrewrite.patterns.onnx.files import quiet_ir
from attnrewrite.patterns.onnx.operators import FEW_BITS, QUANTISED
from attnrewrite.patterns.onnx.recognise import attribute_name

TOLERANCE = 1e-4
# times what rounding loses in a module it may lose in onnxruntime: by hand, ill-conditioned, up to 2, and once 103
TIMES = 8
LITTLE = 1e-2  # a larger difference is no rounding
_HALF = {ir.DataType.FLOAT16: torch.float16, ir.DataType.BFLOAT16: torch.bfloat16}
_ACCURACY = "accuracy_level"  # of MatMulNBits: 4 for products of bytes
_ROUNDS = ("QuantizeLinear", "DynamicQuantizeLinear")


def difference(model: ir.Model, module: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    """The largest difference between a torch module and the model in onnxruntime, over the largest value.

    Where the module rounds to integers, it is compared at what each rounding is given, which the next part of it starts
    from as onnxruntime has it; where it chooses the largest of nearly equal numbers, by the numbers at the places that
    onnxruntime chose, and goes on from these. A rounding that the model lacks is an infinite difference, where the
    answer depends on it. What computes in half precision rounds at other places in onnxruntime than in torch: both are
    compared as they mean it, without, from what the module stores on.
    """
    if not isinstance(module, GraphModule):
        with torch.no_grad():
            return _largest(module(*inputs), run(model, inputs))
    rounded, chosen = _rounded(model, module), _chosen(model, module)
    is_half = half_of(model) is not None and not roundings(module)
    given = tuple(t.float() if t.dtype in HALF else t for t in inputs) if is_half else inputs
    wanted = run(
        _storing(in_float32(model), module) if is_half else model, given, (*rounded.values(), *chosen.values())
    )
    shown = dict(zip((*rounded, *chosen), wanted[len(model.graph.outputs) :], strict=True))
    own, places = ({name: shown[name] for name in names} for names in (rounded, chosen))
    compared = _WideFromChoices(module, places) if is_half else _FromChoices(module, places, own)
    with torch.no_grad():
        found = compared.run(*inputs)
    if isinstance(compared, _FromChoices) and compared.lacking and matter(module, compared.lacking, inputs):
        return math.inf
    return max(compared.error, _largest(found, wanted[: len(model.graph.outputs)]))


class _Following(Recording):
    """Goes on from the places that `chosen` has, by the name of the node that chooses; how far the numbers there are
    from its own choice counts among the errors.
    """

    def __init__(self, module: GraphModule, chosen: Mapping[str, Tensor], *how: Any) -> None:
        super().__init__(module, *how)
        self.error, self.chosen = 0.0, chosen

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.name not in self.chosen:
            return result
        (value, _, *axis), _ = self.fetch_args_kwargs_from_env(n)
        places = laid_out(self.chosen[n.name], result[1].shape)
        if places is None or places.shape != result[1].shape:
            self.error = math.inf
            return result
        numbers = value.take_along_dim(places, axis[0] if axis else -1)
        self.error = max(self.error, _apart(numbers, result[0]))
        return numbers, places


class _FromChoices(_Following, FromRounding):
    """From rounding to rounding, too."""


class _WideFromChoices(_Following, Wide):
    """In float64."""


def allowed_difference(model: ir.Model) -> float:
    """TOLERANCE; HALF_STEPS of half precision, where weights of few bits are rounded to it, as onnxruntime does not."""
    half = half_of(model) if any(node.op_type in FEW_BITS for node in model.graph) else None
    return TOLERANCE if half is None else HALF_STEPS * torch.finfo(half).eps


def beyond_rounding(model: ir.Model, module: nn.Module, inputs: tuple[Tensor, ...], allowed: float) -> float:
    """The `difference`, where that is more than is `allowed` and than rounding explains; else 0."""
    error = difference(model, module, inputs)
    if allowed < error <= LITTLE and isinstance(module, GraphModule):
        allowed = explained(model, module, inputs)
    return 0.0 if error <= allowed else error


def explained(model: ir.Model, module: GraphModule, inputs: tuple[Tensor, ...]) -> float:
    """What difference rounding explains on `inputs`: TIMES what float32 makes of the module there, beside float64.
    Nothing where `difference` looks past rounding by itself: in half precision, and where the module rounds to integers
    or chooses.
    """
    if half_of(model) is not None or roundings(module) or _chosen(model, module):
        return 0.0
    with torch.no_grad():
        exact = Wide(module).run(*inputs)
        return TIMES * _largest(module(*inputs), exact if isinstance(exact, tuple) else (exact,))


def _largest(found: Tensor | tuple[Tensor, ...], wanted: Sequence[Tensor]) -> float:
    pairs = zip(found if isinstance(found, tuple) else (found,), wanted, strict=True)
    return max(_apart(mine, theirs) for mine, theirs in pairs)


def _apart(found: Tensor, wanted: Tensor) -> float:
    """`relative_error` but for what is the same and no number: NaN, as of a query that sees no key, or one infinity.
    Where all is, nothing is known.
    """
    if found.shape != wanted.shape:
        return math.inf
    no_number = (found.isnan() & wanted.isnan()) | (wanted.isinf() & (found == wanted))
    return (
        math.inf if wanted.numel() and bool(no_number.all()) else relative_error(found[~no_number], wanted[~no_number])
    )


def half_of(model: ir.Model) -> torch.dtype | None:
    """The type of half precision that a model computes in, wherever it does; None where it does nowhere."""
    given = (value.dtype for value in (*model.graph.inputs, *model.graph.initializers.values()))
    attributes = (attribute for node in model.graph for attribute in node.attributes.values())
    cast = (attribute.value for attribute in attributes if _is_type(attribute))
    return next((_HALF[kind] for kind in (*given, *cast) if kind in _HALF), None)


def in_float32(model: ir.Model) -> ir.Model:
    """A copy whose values in half precision, and what is cast to it, are float32."""
    result = model.clone()
    for graph in result.graphs():
        made = (value for node in graph for value in node.outputs)
        for value in (*graph.inputs, *graph.initializers.values(), *made):
            if value.dtype in _HALF:
                value.type = ir.TensorType(ir.DataType.FLOAT)  # the copy's own: what it had is the model's, too
            if value.const_value is not None:
                value.const_value = _wider(value.const_value)
        for node in graph:
            for attribute in list(node.attributes.values()):
                if _is_type(attribute) and attribute.value in _HALF:
                    node.attributes[attribute.name] = ir.AttrInt64(attribute.name, int(ir.DataType.FLOAT))
                elif attribute.type == ir.AttributeType.TENSOR:
                    node.attributes[attribute.name] = ir.AttrTensor(attribute.name, _wider(attribute.as_tensor()))
    return result


def _storing(model: ir.Model, module: GraphModule) -> ir.Model:
    """`model`, what the module stores of what it computes as that is: once rounded to half precision."""
    stored = dict(module.named_buffers())
    for node in list(model.graph):
        for value in node.outputs:
            tensor = stored.get(attribute_name(str(value.name)))
            if tensor is not None and tensor.dtype in HALF:
                name = f"{value.name}/stored"
                same = ir.Value(name=name, const_value=ir.tensor(tensor.float().numpy(), name=name))
                model.graph.register_initializer(same)
                value.replace_all_uses_with(same, replace_graph_outputs=True)
    return model


def _is_type(attribute: ir.Attr) -> bool:
    return attribute.name in ("to", "dtype") and attribute.type == ir.AttributeType.INT


def _wider(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name) if tensor.dtype in _HALF else tensor


def _rounded(model: ir.Model, module: GraphModule) -> dict[str, str]:
    """What the roundings of both are given, by the name that marks them in the module: the model's values."""
    own = roundings(module)
    given = {step_name(str(n.outputs[0].name)): str(n.inputs[0].name) for n in model.graph if n.op_type in _ROUNDS}  # type: ignore[union-attr]
    return {name: value for name, value in given.items() if name in own}


def _chosen(model: ir.Model, module: GraphModule) -> dict[str, str]:
    """The model's values that hold the places which nodes of the module choose, by the names of these: in their order,
    where there are as many of both."""
    choices = [node.outputs[1].name for node in model.graph if node.op_type == "TopK"]
    nodes = [node.name for node in module.graph.nodes if node.target in (torch.topk, torch.ops.aten.topk.default)]
    if len(nodes) != len(choices):
        return {}
    return {node: value for node, value in zip(nodes, choices, strict=True) if value}


def run(model: ir.Model, inputs: tuple[Tensor, ...], values: Sequence[str] = ()) -> list[Tensor]:
    """The model's results in onnxruntime, and the `values` on the way; what is quantised runs as it is written.

    Raises InputError as `run_each` does.
    """
    return run_each(_showing(model, values) if values else model, [inputs])[0]


def run_each(model: ir.Model, given: Sequence[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """The model's results in onnxruntime for each of several inputs, one call after another.

    Raises:
        InputError: onnxruntime is not installed, or does not run the model.
    """
    with tempfile.TemporaryDirectory() as folder, quiet_ir():
        path = Path(folder) / "model.onnx"
        ir.save(_to_the_letter(model), path, external_data="model.data", format="protobuf")
        return run_file(path, given, optimised=not any(node.op_type in QUANTISED for node in model.graph))


def _to_the_letter(model: ir.Model) -> ir.Model:
    """`model`, or a copy that does not let onnxruntime round what is multiplied with weights of few bits."""
    if not any(_ACCURACY in node.attributes for node in model.graph):
        return model
    result = model.clone()
    for node in result.graph:
        node.attributes.pop(_ACCURACY, None)
    return result


def run_file(path: Path, given: Sequence[tuple[Tensor, ...]], optimised: bool = True) -> list[list[Tensor]]:
    """The results of the file at `path` in onnxruntime for each of several inputs; where it is not `optimised`, as it
    is written.

    Raises InputError as `run_each` does.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise InputError("onnxruntime is not installed (pip install 'attnrewrite[onnx]')") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # what it raises says it all
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        names = [value.name for value in session.get_inputs()]
        feeds = [{name: t.numpy() for name, t in zip(names, inputs, strict=True)} for inputs in given]
        made = [session.run(None, feed) for feed in feeds]
    except Exception as error:  # onnxruntime raises many kinds
        raise InputError(f"onnxruntime does not run the model: {first_line(error)}") from error
    return [[torch.from_numpy(np.asarray(each)) for each in results] for results in made]


def _showing(model: ir.Model, values: Sequence[str]) -> ir.Model:
    """A copy whose results are followed by `values`: numbers that are rounded, and places that are chosen."""
    result = model.clone()
    made = {value.name: value for node in result.graph for value in node.outputs}
    known = made | {value.name: value for value in result.graph.inputs}
    for place, name in enumerate(values):
        shown = ir.node("Identity", [known[name]])
        maker = known[name].producer()
        chosen = maker is not None and maker.op_type == "TopK" and known[name].index() == 1
        kind = ir.DataType.INT64 if chosen else ir.DataType.FLOAT
        shown.outputs[0].name, shown.outputs[0].type = f"shown/{place}", ir.TensorType(kind)
        result.graph.append(shown)
        result.graph.outputs.append(shown.outputs[0])
    return result
