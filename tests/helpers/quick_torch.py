"""What torch makes anew at every trace, made once: some tenth of a second each, more than a small model takes itself.

Nothing that is traced changes: torch's own functions fill what is kept here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch._dynamo.config
from torch._export import utils
from torch._subclasses.fake_impls import op_implementations_dict
from torch.export import _trace, exported_program
from torch.onnx._internal.exporter._registration import ONNXRegistry

_torchs_own_override = exported_program._override_composite_implicit_decomp
_torchs_own_export = _trace._export
_made: dict[tuple[Any, object], tuple[dict, Callable]] = {}


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
    cached = torch._dynamo.config.fake_tensor_cache_enabled and not dynamic_shapes
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=cached):
        return _torchs_own_export(module, args, kwargs, dynamic_shapes, **options)


def _set_kernels(operator: Any, kernels: dict) -> None:
    operator.py_kernels.clear()
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()


def apply(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(exported_program, "_override_composite_implicit_decomp", _override)
    patch.setattr(utils, "_materialize_cpp_cia_ops", cache(utils._materialize_cpp_cia_ops))
    # It parses its whole ONNX operator library at every export.
    patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
    patch.setattr(_trace, "_export", _export)
