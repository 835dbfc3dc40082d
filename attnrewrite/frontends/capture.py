"""From a model to the graph that is rewritten: torch.export, functionalised, batch left open where possible."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from keyword import iskeyword

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from attnrewrite.errors import InputError, first_line
from attnrewrite.frontends.packed import quantised_layer
from attnrewrite.passes.copying import without_torch_logs
from attnrewrite.passes.fx.composites import DEFINITIONS
from attnrewrite.passes.fx.functionalise import RemoveAssertions, functional_graph
from attnrewrite.passes.fx.signature import writes
from attnrewrite.passes.in_batches import with_images
from attnrewrite.passes.tracing import export_program
from attnrewrite.patterns.fx.operators import is_open
from attnrewrite.patterns.quantised import UNQUANTISED

UNWRITABLE = frozenset("\"'\\\n\r")  # torch.fx writes a module's name between quotation marks


@dataclass(frozen=True)
class Captured:
    """A model as a graph. `fixed_batch` is None when the batch size is open, else the only one that it takes;
    `models_batch` is the only one that the model itself takes, whose graph was opened for others.

    `exact` is False where the model's control flow follows its data: the graph is then what ran on the example, which
    can be read but stands for no other input.
    """

    name: str
    module: GraphModule
    example_inputs: tuple[Tensor, ...]
    fixed_batch: int | None
    note: str | None = None
    exact: bool = True
    models_batch: int | None = None


def open_batch(inputs: tuple[Tensor, ...]) -> tuple[dict[int, object], ...]:
    return tuple({0: Dim.AUTO} if tensor.dim() else {} for tensor in inputs)


def export(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[ExportedProgram, str | None]:
    """Export with an open batch where torch can, else with the batch of `inputs`; and why not, in one line.

    Raises:
        InputError: torch.export cannot capture the module at all.
    """
    doubled = with_images(inputs, 2) if batch_of(inputs) == 1 else inputs  # one would be baked into the graph
    with torch.no_grad(), without_torch_logs():
        try:
            program = export_program(module, doubled, dynamic_shapes=open_batch(doubled))
            if _opens_all(program, doubled):
                return program, None
            note = "the model fixes its batch size"
        except Exception as error:  # torch.export raises many kinds
            note = first_line(error)
        try:
            return export_program(module, inputs), note
        except Exception as error:
            way_out = "give a model whose forward takes tensors and has no data-dependent Python control flow"
            if isinstance(module, torch.jit.ScriptModule):
                way_out = "give the module that it was scripted or traced from"
            elif layer := quantised_layer(module):
                way_out = f"{layer} is quantized: {UNQUANTISED}"
            raise InputError(
                f"{type(module).__name__} cannot be captured by torch.export: {first_line(error)}; {way_out}"
            ) from error


def _require_writable_names(name: str, model: nn.Module | ExportedProgram) -> None:
    """Raise InputError where a module or tensor has a name that torch.fx writes code with which is no Python."""
    if isinstance(model, ExportedProgram):
        paths = list(model.state_dict)
    else:
        tensors = (*model.named_parameters(), *model.named_buffers())
        paths = [path for path, _ in (*model.named_modules(), *tensors)]
    parts = {part for path in paths for part in path.split(".")}
    odd = next((part for part in sorted(parts) if iskeyword(part) or set(part) & UNWRITABLE), None)
    if odd is not None:
        raise InputError(f"{name} calls a part of it {odd!r}, which no graph can write as Python: rename it")


def inputs_of(program: ExportedProgram) -> list[object]:
    """What the program says of each of its inputs: tensors with their shapes, where they are tensors."""
    names = set(program.graph_signature.user_inputs)
    return [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in names]


def batch_of(inputs: Iterable[object]) -> int | torch.SymInt:
    """The length of the first axis of the first input that has one: a symbol where any is taken."""
    return next((value.shape[0] for value in inputs if isinstance(value, Tensor) and value.dim()), 1)


def has_open_batch(program: ExportedProgram) -> bool:
    """Whether the program takes any batch size: torch.export settles for one where the model's code does."""
    return is_open(batch_of(inputs_of(program)))


def _opens_all(program: ExportedProgram, inputs: Sequence[Tensor]) -> bool:
    """Whether every input takes any batch size that is as long as the batch: an encoder of two may settle for one."""
    batch = batch_of(inputs)
    known = zip(inputs_of(program), inputs, strict=True)
    followed = [value.shape[0] for value, given in known if isinstance(value, Tensor) and given.shape[:1] == (batch,)]
    return bool(followed) and all(map(is_open, followed))


def _for_one_size(name: str, program: ExportedProgram, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    """The program for images of the size of `inputs`, where it leaves more open than how many they are: forms hold to
    one grid.
    """
    tensors = [value for value in inputs_of(program) if isinstance(value, Tensor)]
    if not any(is_open(size) for tensor in tensors for size in tensor.shape[1:]):
        return program
    size = ", ".join("x".join(map(str, tensor.shape[1:])) for tensor in inputs)
    logging.getLogger("attnrewrite").warning("%s leaves the size of its inputs open, and is read for %s", name, size)
    module = program.module(check_guards=False)
    if has_open_batch(program):
        return export(module, inputs)[0]
    try:
        with torch.no_grad(), without_torch_logs():
            return export_program(module, inputs)
    except Exception as error:  # torch.export raises many kinds
        raise InputError(f"{name} cannot be read for inputs of {size}: {first_line(error)}; give other ones") from error


def capture(name: str, model: nn.Module | ExportedProgram, example_inputs: tuple[Tensor, ...]) -> Captured:
    """The functional graph of a model in evaluation mode, its parameters as attributes.

    Raises:
        InputError: the model can neither be exported nor traced on its example inputs.
    """
    _require_writable_names(name, model)
    if isinstance(model, ExportedProgram):
        program, note = _for_one_size(name, model, example_inputs), None
    else:
        try:
            is_graph = isinstance(model, GraphModule)  # captured in evaluation mode, and stays in it
            program, note = export(model if is_graph else model.eval(), example_inputs)
        except InputError as refusal:
            return _traced_on_example(name, model, example_inputs, refusal)
    module = functional_graph(program)
    batch = batch_of(node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder")
    fixed = None if is_open(batch) else int(batch)
    if fixed is not None and note is None:
        note = "the exported program has a fixed batch size"
    return Captured(name, module, example_inputs, fixed, note)


def _trace(model: nn.Module, inputs: tuple[Tensor, ...]) -> GraphModule:
    """The operations of one call, none of them in place; what a model reads of its own constants, as the lengths of
    windows, are numbers in it. The graph is made functional, not the call: torch can read no numbers inside that.
    """
    state = torch.get_rng_state()
    module = make_fx(model, DEFINITIONS, record_module_stack=True)(*inputs)
    if not any(node.op == "call_function" and writes(node) for node in module.graph.nodes):
        return module
    torch.set_rng_state(state)  # sizes may follow from what was drawn
    with preserve_node_meta():
        return make_fx(torch.func.functionalize(Interpreter(module).run, remove="mutations"), DEFINITIONS)(*inputs)


def _traced_on_example(name: str, model: nn.Module, inputs: tuple[Tensor, ...], refusal: InputError) -> Captured:
    """The operations that ran on the example: all that can be had of a model whose control flow follows its data."""
    try:
        with torch.no_grad():
            module = _trace(model, inputs)
    except Exception as error:
        raise refusal from error
    names = {id(tensor): path for path, tensor in [*model.named_parameters(), *model.named_buffers()]}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            tensor = getattr(module, str(node.target))
            node.meta.setdefault("val", tensor)
            node.meta["parameter"] = names.get(id(tensor), str(node.target))
    module = RemoveAssertions()(module)
    return Captured(name, module, inputs, next((len(x) for x in inputs if x.dim()), 1), str(refusal), exact=False)
