"""What differs between two ONNX models, node by node: proof that a rewrite changed the sites and nothing else."""

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Difference:
    """Nodes by their first output, initialisers by name; `signature` are the parts around the graph that differ."""

    removed: tuple[str, ...]
    added: tuple[str, ...]
    changed: tuple[str, ...]
    initialisers_removed: tuple[str, ...]
    initialisers_added: tuple[str, ...]
    initialisers_changed: tuple[str, ...]
    signature: tuple[str, ...]


def difference(before: ir.Model, after: ir.Model) -> Difference:
    """Compare two models in everything they hold: operators, names, attributes, metadata, weights, signature."""
    old, new = _nodes(before), _nodes(after)
    stored, kept = _initialisers(before), _initialisers(after)
    return Difference(
        removed=tuple(name for name in old if name not in new),
        added=tuple(name for name in new if name not in old),
        changed=tuple(name for name in old if name in new and old[name] != new[name]),
        initialisers_removed=tuple(name for name in stored if name not in kept),
        initialisers_added=tuple(name for name in kept if name not in stored),
        initialisers_changed=tuple(name for name in stored if name in kept and stored[name] != kept[name]),
        signature=tuple(part for part, value in _signature(before).items() if value != _signature(after)[part]),
    )


def _nodes(model: ir.Model) -> dict[str, bytes]:
    named = ((next((v.name for v in node.outputs if v.name), node.name or ""), node) for node in model.graph)
    return {name: ir.serde.serialize_node(node).SerializeToString(deterministic=True) for name, node in named}


def _initialisers(model: ir.Model) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        found[name] = () if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.tobytes())
    return found


def _signature(model: ir.Model) -> dict[str, object]:
    graph = model.graph
    return {
        "inputs": [_typed(value) for value in graph.inputs],
        "outputs": [_typed(value) for value in graph.outputs],
        "opsets": dict(model.opset_imports),
        "metadata": (dict(model.metadata_props), dict(graph.metadata_props)),
        "names": (graph.name, graph.doc_string, model.doc_string),
        "producer": (model.producer_name, model.producer_version, model.domain, model.model_version, model.ir_version),
        "functions": sorted(map(str, model.functions)),
    }


def _typed(value: ir.Value) -> bytes:
    return ir.serde.serialize_value(value).SerializeToString(deterministic=True)
