"""A program in operators that coremltools reads: what it lacks, or cannot translate, as torch itself writes it out.

Nothing here knows a single operator: coremltools' registry says what it lacks, torch's table of decompositions how to
say it in others.
"""

import re
import traceback
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from attnrewrite.errors import InputError
from attnrewrite.passes.fx.decompositions import either, in_others
from attnrewrite.passes.fx.lacking import LACKING
from attnrewrite.passes.fx.misread import WRITTEN_OUT
from attnrewrite.targets.limits import described
from attnrewrite.targets.prepare import canonical

DEEPEST = 8  # a decomposition may itself be of what is lacking: so often at most


def readable(program: ExportedProgram) -> ExportedProgram:
    """The program with every operator that coremltools lacks written out.

    Raises:
        InputError: one is left that torch does not write out, or it draws random numbers, so that no package can give
            what it gives; it is named with its node.
    """
    _refuse_branches(program)
    _refuse_chance(program)
    tried: set[object] = set()
    for _ in range(DEEPEST):
        unknown = [node for node in _operators(program) if not _is_known(node.target)]
        # Those of ours at once, as coremltools fails at them; what ours leave of them, it may have.
        failing = [node for node in _operators(program) if node.target in LACKING and node.target not in tried]
        if not unknown and not failing:
            return _without_words(program)
        tried |= {node.target for node in failing}
        try:
            simpler = written_out(program, {node.target for node in (*unknown, *failing)})
        except Exception as error:  # torch's decompositions raise what their parts raise
            raise _refused((*unknown, *failing)[0]) from error
        if simpler is None:
            raise _refused(unknown[0])
        program = simpler
    raise _refused((*unknown, *failing)[0])


def _without_words(program: ExportedProgram) -> ExportedProgram:
    """The program, none of its values called like a text that an operator takes: coremltools takes it for the value.

    A division rounded down, "floor", fails beside a value of that name. Only names change.
    """
    words = {
        leaf for node in program.graph.nodes for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, str)
    }
    for node in program.graph.nodes:
        if node.op == "call_function" and node.name in words:
            before = node.name
            node._rename(f"{before}_value")
            for spec in program.graph_signature.output_specs:
                if getattr(spec.arg, "name", None) == before:
                    spec.arg.name = node.name  # type: ignore[union-attr]
    return program


def _refused(node: fx.Node) -> InputError:
    return InputError(
        f"coremltools has no operator {described(node)}: rewrite that part of the model, or lower for another target"
    )


def without(program: ExportedProgram, node: fx.Node) -> ExportedProgram | None:
    """The program with the operator of `node` written out, in others that coremltools reads; None where it cannot be.

    It is for what coremltools knows and fails at.
    """
    try:
        simpler = written_out(program, [node.target])
        return None if simpler is None else readable(simpler)
    except Exception:  # of torch's decompositions; the caller tells what coremltools said
        return None


def _refuse_branches(program: ExportedProgram) -> None:
    """Operators that call graphs of their own, which ways follow from values: torch writes none of them out."""
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise _refused(node)


@torch.inference_mode()
def _refuse_chance(program: ExportedProgram) -> None:
    """An operator that may draw is no fault by itself: an LSTM does where it drops values out, while it is trained."""
    drawing = [node for node in _operators(program) if torch.Tag.nondeterministic_seeded in node.target.tags]
    if not drawing or program.example_inputs is None:
        return
    module, (given, named) = program.module(), program.example_inputs
    once, again = (tree_leaves(module(*given, **named)) for _ in range(2))
    if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(once, again, strict=True)):
        nodes = ", ".join(map(described, drawing))
        raise InputError(
            f"its output is no function of its input: it draws random numbers with {nodes}; make forward repeatable"
        )


def written_out(program: ExportedProgram, operators: Collection[Any]) -> ExportedProgram | None:
    """The program without those of `operators` that torch can say in others; None where that is none."""
    ours = {each: WRITTEN_OUT[each] for each in operators if each in WRITTEN_OUT}
    # Torch writes some out in primitives of its own, which say what they are in aten.
    primitives = {each: each.impl_aten for each in operators if getattr(each, "namespace", "") == "prims"}
    table = either(ours, in_others(operators) | primitives)
    return canonical(program, table) if table else None


def culprit(error: BaseException, program: ExportedProgram) -> fx.Node | None:
    """The node of `program` that coremltools was translating when it raised `error`; None where it was at none."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        translated = frame.f_locals.get("node")
        if frame.f_code.co_name == "convert_nodes" and translated is not None:
            return next((node for node in _operators(program) if node.name == translated.name), None)
    return None


def high_rank(error: BaseException, program: ExportedProgram) -> str | None:
    """What has more axes than Core ML takes, where that is what coremltools raised `error` for."""
    layer = re.search(r'rank <= (\d+)\. Layer "([^"]+)", with type "([^"]+)"', str(error))
    if layer is None:
        return None
    most, name, kind = layer.groups()
    # What coremltools makes of a node has the node's name, and more behind it where it makes several.
    nodes = [node for node in _operators(program) if name == node.name or name.startswith(f"{node.name}_")]
    operator = described(max(nodes, key=lambda node: len(node.name))) if nodes else f"{kind} (layer {name!r})"
    return f"{operator} has more than the {most} axes that Core ML takes, and not in a way that fewer can say"


def _operators(program: ExportedProgram) -> list[Any]:
    return [node for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def _is_known(operator: Any) -> bool:
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    return operator.namespace != "prims" and _TORCH_OPS_REGISTRY.get_func(operator.__name__) is not None
