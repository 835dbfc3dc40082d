"""Whatever is moved on its way to an operator, moved in as few steps as its view takes.

Transposes come first in the count, as each is a copy through memory.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from attnrewrite.targets.coreml.passes import views

Cost = tuple[Fraction, Fraction]


def apply(block: Any) -> int:
    """Shorten every chain of movement that another says in fewer transposes or operators; how many were."""
    return sum(_shortened(variable, block) for variable in list(_ends(block)))


def _ends(block: Any) -> Iterator[Any]:
    """What movement makes and something else reads."""
    outputs = {variable.name for variable in block.outputs}
    for operation in block.operations:
        if operation.op_type in views.MOVES:
            for variable in operation.outputs:
                if variable.name in outputs or any(child.op_type not in views.MOVES for child in variable.child_ops):
                    yield variable


def _shortened(variable: Any, block: Any) -> bool:
    source = variable.op.inputs["x"]
    if (source.op is None or source.op.op_type not in views.MOVES) and tuple(source.shape) != tuple(variable.shape):
        return False  # one step, and not an idle one
    found = views.origin(variable, lambda each: each.op is None or each.op.op_type not in views.MOVES)
    wanted = None if found is None else views.view(found.index)
    if found is None or wanted is None:
        return False
    before = _shared_cost(variable, found.base)
    known = set(map(id, block.operations))  # names are not unique yet
    made = views.write(wanted, found.base, variable.op)
    if made is None:
        return False
    added = [each for each in block.operations if id(each) not in known]
    if _cost([each for each in added if each.op_type in views.MOVES]) >= before:
        block.remove_ops(added[::-1])
        return False
    return bool(block.try_replace_uses_of_var_after_op(anchor_op=variable.op, old_var=variable, new_var=made))


def _shared_cost(variable: Any, base: Any) -> Cost:
    """What would be saved without `variable`: of an operator that other movement reads too, its share."""
    transposes, operators, share = Fraction(0), Fraction(0), Fraction(1)
    while variable is not base:
        transposes += share * (variable.op.op_type == "transpose")
        operators += share
        variable = variable.op.inputs["x"]
        if any(each.op_type not in views.MOVES for each in variable.child_ops):
            break  # it is needed in any case
        share /= len(variable.child_ops)
    return transposes, operators


def _cost(operations: list[Any]) -> Cost:
    return Fraction(sum(each.op_type == "transpose" for each in operations)), Fraction(len(operations))
