"""What torch makes anew at every trace, made once: some tenth of a second each, more than a small model takes itself.

Nothing that is traced changes: torch's own functions fill what is kept here. A model of the tests that was exported
before, with the same weights and inputs, is not exported again: each asker has a copy of that program.
"""

import copy
import hashlib
import io
import pickle
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch._dynamo.config
from torch import Tensor, nn
from torch._export import utils
from torch._export.serde import schema, serialize
from torch._subclasses.fake_impls import op_implementations_dict
from torch.export import ExportedProgram, _trace, exported_program
from torch.fx import graph_module
from torch.onnx._internal.exporter._registration import ONNXRegistry

_torchs_own_override = exported_program._override_composite_implicit_decomp
_torchs_own_export = _trace._export
_made: dict[tuple[Any, object], tuple[dict, Callable]] = {}
_exported: dict[str | None, Any] = {}
_MOST_KEPT = 2_000_000  # weights, of a model that is held for the next that asks


@contextmanager
def _override(table: Mapping[Any, Callable]) -> Iterator[None]:
    """Some nine hundred composite operators each get twenty kernels for the time of a decomposition, then lose them."""
    free = {operator for operator in table if operator not in op_implementations_dict}
    known = {operator for operator in free if _key(operator, table[operator]) in _made}
    before = {operator: operator.py_kernels.copy() for operator in known}
    fresh = {operator: function for operator, function in table.items() if operator not in known}
    with _torchs_own_override(fresh):
        for operator in fresh.keys() & free:
            kernels = operator.py_kernels.copy()
            _made[_key(operator, table[operator])] = kernels, op_implementations_dict[operator]
        for operator in known:
            kernels, op_implementations_dict[operator] = _made[_key(operator, table[operator])]
            _set_kernels(operator, kernels)
        try:
            yield
        finally:
            for operator in known:
                _set_kernels(operator, before[operator])
                op_implementations_dict.pop(operator, None)


def _key(operator: Any, function: Callable) -> tuple[Any, object]:
    """torch makes its own decomposition of an operator anew for each table: a call of one function on the operator."""
    own = isinstance(function, partial) and function.keywords == {"kernel": operator}
    return operator, "torch's own" if own else function


def _export(module: Any, args: Any, kwargs: Any = None, dynamic_shapes: Any = None, **options: Any) -> Any:
    """With open sizes every operation is computed twice: the second time for a cache that is hardly ever hit."""
    key = _content((module, args, kwargs, dynamic_shapes, options)) if _is_of_the_tests(module) else None
    if key in _exported and _exported[key].still_true():
        return _exported[key].program(module, args, kwargs)
    cached = torch._dynamo.config.fake_tensor_cache_enabled and not dynamic_shapes
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=cached):
        program = _torchs_own_export(module, args, kwargs, dynamic_shapes, **options)
    if key is not None:
        _exported[key] = _Exported(program)
    return program


def _is_of_the_tests(module: Any) -> bool:
    """Whether it is small, and nothing of the project is in it: what tests replace there must reach exports, too."""
    ours = ("attnrewrite.", "torch.fx.")
    if not isinstance(module, nn.Module) or any(type(part).__module__.startswith(ours) for part in module.modules()):
        return False
    return sum(tensor.numel() for tensor in module.state_dict().values()) < _MOST_KEPT


def _content(of: Any) -> str | None:
    """A digest of all that it is made of; None of what cannot be written down, as a class inside of a function."""
    stream = io.BytesIO()
    try:
        _Writer(stream, protocol=5).dump(of)
    except Exception:  # objects refuse to be pickled in many ways
        return None
    return hashlib.sha256(stream.getvalue()).hexdigest()


class _Writer(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        numbers = obj.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return type(obj), (str(obj.dtype), tuple(obj.shape), obj.stride(), obj.requires_grad, numbers)


class _Exported:
    """A program as it was exported, for models like the one that it was exported from."""

    def __init__(self, program: ExportedProgram) -> None:
        self._own = _copied(program, program.state_dict, program.example_inputs)
        self._sizes = self._known_sizes()

    def still_true(self) -> bool:
        """Whether nobody has since asked a question about an open size that settles it."""
        return self._sizes == self._known_sizes()

    def program(self, module: nn.Module, args: Any, kwargs: Any) -> ExportedProgram:
        return _copied(self._own, module.state_dict(keep_vars=True), (tuple(args), dict(kwargs or {})))

    def _known_sizes(self) -> tuple[Any, ...]:
        vals = [node.meta.get("val") for node in self._own.graph.nodes if node.op == "placeholder"]
        modes = {id(val.fake_mode): val.fake_mode for val in vals if hasattr(val, "fake_mode")}
        envs = [mode.shape_env for mode in modes.values() if mode.shape_env is not None]
        return tuple((len(env.guards), dict(env.replacements)) for env in envs)


def _copied(program: ExportedProgram, state: Mapping[str, Any], inputs: Any) -> ExportedProgram:
    constants = {name: each.clone() if isinstance(each, Tensor) else each for name, each in program.constants.items()}
    graph = copy.deepcopy(program.graph)
    for own, copied in zip(program.graph.nodes, graph.nodes, strict=True):
        copied.name = own.name  # a copy is called otherwise where the name is also one of Python's
    return ExportedProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict={name: state[name] for name in program.state_dict},
        range_constraints=dict(program.range_constraints),
        module_call_graph=copy.deepcopy(program.module_call_graph),
        example_inputs=inputs,
        constants=constants,
        verifiers=program.verifiers,
    )


def _set_kernels(operator: Any, kernels: dict) -> None:
    operator.py_kernels.clear()
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()


def _exec_with_source(source: str, names: dict[str, Any], fields: dict[str, Any] | None = None) -> None:
    """Every pass of an export has its graph written as Python, most of them the same one."""
    exec(_in_file(_compiled(source), graph_module._loader.cache(source, names, fields)), names)


_compiled = cache(partial(compile, filename="", mode="exec", dont_inherit=True))


def _in_file(code: CodeType, name: str) -> CodeType:
    inside = (_in_file(each, name) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=name, co_consts=tuple(inside))


@cache
def _fields(schema_class: type) -> dict[str, Any]:
    return typing.get_type_hints(schema_class, globalns=vars(schema))


def apply(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(exported_program, "_override_composite_implicit_decomp", _override)
    patch.setattr(utils, "_materialize_cpp_cia_ops", cache(utils._materialize_cpp_cia_ops))
    # It parses its whole ONNX operator library at every export.
    patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
    patch.setattr(_trace, "_export", _export)
    patch.setattr(graph_module, "_exec_with_source", _exec_with_source)
    # It reads the types of its records anew for every record of a file.
    typed = {**vars(typing), "get_type_hints": lambda schema_class, globalns: _fields(schema_class)}
    patch.setattr(serialize, "typing", SimpleNamespace(**typed))
