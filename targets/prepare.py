"""A module made ready for a compiler: in float32, for fixed shapes, its operators in spellings that compilers read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_leaves

from attnrewrite.errors import InputError, first_line
from attnrewrite.passes.base import Pipeline
from attnrewrite.passes.copying import without_torch_logs
from attnrewrite.passes.fx.complex_pairs import ComplexAsPairs
from attnrewrite.passes.fx.decompositions import Decompose, either
from attnrewrite.passes.fx.flex import WriteOutFlex
from attnrewrite.passes.fx.fold_constants import FoldConstants
from attnrewrite.passes.fx.functionalise import functional_graph
from attnrewrite.passes.fx.in_float32 import InFloat32
from attnrewrite.passes.fx.misread import WRITTEN_OUT
from attnrewrite.passes.fx.quantise import QUANTISED, TABLE
from attnrewrite.passes.tracing import export_program
from attnrewrite.passes.wide import Wide
from attnrewrite.patterns.fx.operators import asserts
from attnrewrite.targets import agreement as check


def _canonical(table: Mapping[Any, Callable[..., Any]]) -> Pipeline[ExportedProgram]:
    return Pipeline((WriteOutFlex(), Decompose(table), FoldConstants()), name="canonical")


CANONICAL = _canonical(WRITTEN_OUT)
HALVES = {torch.float16: check.FLOAT16, torch.bfloat16: check.BFLOAT16}


@dataclass(frozen=True)
class Prepared:
    """A module in float32 and inputs for it. `notes` says what was changed; empty where nothing was.

    `unrounded` is the module before its linear layers came to round to integers; None where they do not.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    notes: tuple[str, ...] = ()
    unrounded: nn.Module | None = None

    def agree(self, subject: str, found: Sequence[np.ndarray]) -> check.Agreement:
        """Hold what was computed for the inputs to what the module gives. CheckFailedError where it is too far off."""
        expected = reference(self.module, self.inputs)
        if self.unrounded is None:
            return check.agree(subject, found, expected, check.FLOAT32, self._exact)
        return check.agree_rounded(subject, found, expected, reference(self.unrounded, self.inputs))

    def _exact(self) -> tuple[np.ndarray, ...]:
        return exact(specialise(self.module, self.inputs), self.inputs)


def in_float32(module: nn.Module, example_inputs: tuple[Tensor, ...]) -> Prepared:
    """`module` with what it holds and computes in float16 or bfloat16 in float32; itself where there is none of that.

    Compilers read half precision in mixed types (TVM gives a linear map of float16 in float32) or not at all, and a
    reference that rounds to it would hide small mistakes of theirs.

    Raises:
        InputError: torch.export cannot capture the module.
        CheckFailedError: in float32 it gives other outputs than half precision explains.
    """
    held = (*module.parameters(), *module.buffers(), *example_inputs)
    found = [dtype for dtype in HALVES if any(tensor.dtype == dtype for tensor in held)]
    if not found:
        return Prepared(module, example_inputs)
    own = specialise(module, example_inputs).module()
    assert isinstance(own, GraphModule)
    wide = InFloat32()(own)  # a copy: the program shares its weights with the module
    inputs = tuple(tensor.float() if tensor.dtype in HALVES else tensor for tensor in example_inputs)
    relative = max(HALVES[dtype] for dtype in found)
    check.agree("the module in float32", reference(wide, inputs), reference(module, example_inputs), relative)
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in found)
    return Prepared(wide, inputs, (f"compiled from the model in float32 (it is in {names}): its inputs are float32",))


def quantised(prepared: Prepared) -> Prepared:
    """The module with its linear layers on integers of eight bits, as `passes.fx.quantise` writes them out.

    Raises:
        InputError: torch.export cannot capture it, or there is no linear layer in it.
        CheckFailedError: it gives other outputs once it is written in operators that compilers read.
    """
    program = canonical(specialise(prepared.module, prepared.inputs))
    plain = reference(program.module(), prepared.inputs)
    check.agree("the module written out", plain, reference(prepared.module, prepared.inputs), check.FLOAT32)
    made, edits = QUANTISED.apply(program)
    count = sum(edit.by is None and edit.replaced in map(str, TABLE) for edit in edits)
    if not count:
        raise InputError("the module has no linear layer, and nothing else is computed in int8: leave --precision out")
    note = f"{count} linear layers in int8: weights by output channel, activations by row as they come"
    return Prepared(made.module(), prepared.inputs, (*prepared.notes, note), prepared.module)


def specialise(module: nn.Module, example_inputs: tuple[Tensor, ...]) -> ExportedProgram:
    """`module` exported for exactly the shapes of `example_inputs`, whatever dimensions it had been dynamic in; its
    complex numbers in pairs, where every operation on them is known.

    Raises:
        InputError: torch.export cannot capture it.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # The fused encoder-layer operator of nn.TransformerEncoder is one that no importer knows.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), without_torch_logs():  # some operators have no gradient on every processor
            return _in_pairs(_without_assertions(export_program(module, example_inputs)))
    except GuardOnDataDependentSymNode as error:
        raise InputError(
            f"torch.export cannot capture the module: a branch or a size in it follows from values "
            f"({first_line(error, 80)}): write it so that neither depends on them"
        ) from error
    except Exception as error:
        raise InputError(f"torch.export cannot capture the module for these inputs: {first_line(error)}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _without_assertions(program: ExportedProgram) -> ExportedProgram:
    """The program itself without assertions and what they alone read. Whatever else nothing reads stays: of functions
    that are mapped, some is there for what it does.
    """
    waiting = [node for node in program.graph.nodes if asserts(node)]
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and not node.users:
            waiting.extend(node.all_input_nodes)
            program.graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _in_pairs(program: ExportedProgram) -> ExportedProgram:
    made = ComplexAsPairs().apply(program)
    return FoldConstants()(made.graph) if made.modified else program  # stored numbers are complex until they are folded


class _Tensors(nn.Module):
    """The tensors that a module gives, in order; each once, where `once`."""

    def __init__(self, module: nn.Module, once: bool) -> None:
        super().__init__()
        self.module, self.once = module, once

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        tensors = [leaf for leaf in tree_leaves(self.module(*inputs)) if isinstance(leaf, Tensor)]
        return tuple({id(tensor): tensor for tensor in tensors}.values()) if self.once else tuple(tensors)


def tensors_alone(program: ExportedProgram) -> ExportedProgram:
    """The program without outputs that are no tensors: numbers, and None."""
    if all(isinstance(each, Node) for each in _given(program)):
        return program
    assert program.example_inputs is not None
    return export_program(_Tensors(program.module(), once=False), *program.example_inputs)


def _given(program: ExportedProgram) -> Sequence[object]:
    given = program.graph.output_node().args[0]
    assert isinstance(given, Sequence)
    return given


def each_once(
    module: nn.Module, example_inputs: tuple[Tensor, ...]
) -> tuple[ExportedProgram, nn.Module, tuple[str, ...]]:
    """The program of `module` and the module that it is of, which gives tensors alone and none twice; with a note where
    that is another than `module`. For compilers whose programs have no other outputs.

    Raises:
        InputError: torch.export cannot capture it.
    """
    program = specialise(module, example_inputs)
    given = _given(program)
    if all(isinstance(each, Node) for each in given) and len(set(given)) == len(given):
        return program, module, ()
    plain = _Tensors(module, once=True)
    return specialise(plain, example_inputs), plain, ("outputs that are no tensors, or given before, are left out",)


def canonical(program: ExportedProgram, others: Mapping[Any, Callable[..., Any]] | None = None) -> ExportedProgram:
    """The program in operators that compilers read, none of them in place; what depends on no input is computed.

    What `others` has is written out as it says, in the same trace: a trace costs more than all else here.
    """
    return CANONICAL(program) if others is None else _canonical(either(others, WRITTEN_OUT))(program)


def arrays(values: object) -> tuple[np.ndarray, ...]:
    """The tensors and arrays inside `values` (a tensor, a tuple, a dictionary, a model's output record), in order.

    bfloat16 becomes float32.
    """
    leaves = tree_leaves(values)
    tensors = (_array(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return tuple(leaf for leaf in tensors if isinstance(leaf, np.ndarray))


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # numpy has no bfloat16


def exact(program: ExportedProgram, inputs: tuple[Tensor, ...]) -> tuple[np.ndarray, ...]:
    """What the program gives for `inputs` in float64."""
    return arrays(Wide(functional_graph(program)).run(*inputs))


def reference(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[np.ndarray, ...]:
    """What the module itself gives for `inputs`."""
    with torch.inference_mode():
        return arrays(module(*inputs))
