"""What a pass over exported programs keeps: inputs, outputs, and that nothing is written in place."""

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from attnrewrite.errors import Refusal


def writes(node: Node) -> bool:
    """Whether an operation writes into one of its operands."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def lost_writes(before: ExportedProgram, after: ExportedProgram) -> Refusal | None:
    """What `before` says that it writes to and `after` does not. What was written in place is only said afterwards."""
    lost = _written(before) - _written(after)
    return Refusal("lost-effects", f"no longer writes to {', '.join(map(str, lost))}") if lost else None


def writes_in_place(program: ExportedProgram) -> Refusal | None:
    """The first operation that writes into one of its operands."""
    found = next((node for node in program.graph.nodes if writes(node)), None)
    return None if found is None else Refusal("in-place", f"writes in place at {found.name} ({found.target})")


def other_signature(before: ExportedProgram, after: ExportedProgram) -> Refusal | None:
    """What a caller of `after` would have to do otherwise than one of `before`, or find changed; None: nothing."""
    if _written(before) != _written(after):
        return Refusal("other-effects", "writes to other buffers or inputs than before")
    return other_interface(before, after)


def other_interface(before: ExportedProgram, after: ExportedProgram) -> Refusal | None:
    """What a caller of `after` would have to do otherwise than one of `before`; None when nothing."""
    one, other = before.graph_signature, after.graph_signature
    if before.call_spec.in_spec != after.call_spec.in_spec or one.user_inputs != other.user_inputs:
        was, now = (", ".join(map(str, each.user_inputs)) for each in (one, other))
        return Refusal("other-inputs", f"takes {now}, not {was}, or in another structure")
    if before.call_spec.out_spec != after.call_spec.out_spec:
        return Refusal("other-outputs", "gives its outputs in another structure")
    return None


def _written(program: ExportedProgram) -> set[str | None]:
    """The buffers and inputs that a call of the program changes."""
    kinds = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)
    return {spec.target for spec in program.graph_signature.output_specs if spec.kind in kinds}
