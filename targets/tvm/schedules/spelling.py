"""Operators of Relax that are several in one, written out in those that rules know: fused kernels reach them so."""

import math
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from attnrewrite.targets.tvm.schedules.graph import is_float, shape

ATTENTION = ("relax.nn.attention", "relax.nn.attention_bias")


def written_out(module: Any) -> Any:
    """The module with every plain `nn.attention` as products around a softmax; a causal one stays as it is."""
    writer = _Writer(module)
    main = module.get_global_var("main")
    writer.builder_.update_func(main, writer.visit_expr(module[main]))
    return writer.builder_.get()


@mutator
class _Writer(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: Any) -> Any:
        call = super().visit_call_(call)
        if not isinstance(call.op, tvm.ir.Op) or call.op.name not in ATTENTION:
            return call
        plain = call.attrs.causal_mask is None and all(map(is_float, (call, *call.args)))
        return self.attention(call) if plain else call

    def attention(self, call: Any) -> Any:
        """[batch, tokens, heads, channels], as Relax has query, key and value, with a bias on the scores or without."""
        emit, op = self.builder_.emit, relax.op
        query, key, value = (emit(op.permute_dims(each, [0, 2, 1, 3])) for each in call.args[:3])
        scale = call.attrs.scale
        factor = 1 / math.sqrt(shape(query)[-1]) if scale is None else float(scale.value)
        scores = emit(op.matmul(query, emit(op.permute_dims(key, [0, 1, 3, 2]))))
        scores = emit(op.multiply(scores, relax.const(factor, "float32")))
        if len(call.args) > 3:
            scores = emit(op.add(scores, call.args[3]))
        return op.permute_dims(emit(op.matmul(emit(op.nn.softmax(scores, -1)), value)), [0, 2, 1, 3])
