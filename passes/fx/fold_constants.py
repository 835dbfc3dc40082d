"""Whatever a program computes from its weights alone, computed once, before any compiler sees it.

Position biases looked up in a table, masks built by filling zeros, class tokens expanded: every inference would repeat
them, and it is among them that compilers find operators they lack.
"""

import operator

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.fx.node import map_arg


@torch.no_grad()
def fold_constants(program: ExportedProgram) -> ExportedProgram:
    """The functional `program` with every value that depends on no input stored as a constant; unused weights go."""
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    values = _constant_values(module)
    for index, node in enumerate(_boundary(values)):
        name = f"folded_{index}"
        module.register_buffer(name, values[node].contiguous())
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.get_attr(name))
    module.graph.eliminate_dead_code()
    _drop_unused(module)
    module.recompile()
    assert program.example_inputs is not None
    return torch.export.export(module, program.example_inputs[0])


def _constant_values(module: fx.GraphModule) -> dict[fx.Node, Tensor]:
    """The value of every node that is computed from no input, the weights themselves among them."""
    values: dict[fx.Node, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            values[node] = operator.attrgetter(node.target)(module)
        elif _repeatable(node) and all(given in values for given in node.all_input_nodes):
            arguments, keywords = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*arguments, **keywords)
    return values


def _repeatable(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    operation = node.target
    return isinstance(operation, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in operation.tags


def _boundary(values: dict[fx.Node, Tensor]) -> list[fx.Node]:
    """The computed constants that something not constant reads."""
    return [
        node
        for node, value in values.items()
        if node.op != "get_attr" and isinstance(value, Tensor) and any(user not in values for user in node.users)
    ]


def _drop_unused(module: fx.GraphModule) -> None:
    used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    held = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name in {name for name, _ in held} - used:
        owner, _, leaf = name.rpartition(".")
        delattr(module.get_submodule(owner), leaf)
