"""A pass of ours as a pass of onnx_ir, for its PassManager."""

import onnx_ir as ir

from attnrewrite.passes.base import Pass, PassResult


class IrPass(ir.passes.PassBase):
    """`inner`, its contract included, as onnx_ir calls passes."""

    def __init__(self, inner: Pass[ir.Model]) -> None:
        super().__init__()
        self.inner = inner

    @property
    def in_place(self) -> bool:
        return self.inner.in_place

    @property
    def changes_input(self) -> bool:
        return self.inner.in_place

    def apply(self, model: ir.Model) -> PassResult[ir.Model]:
        """The rewritten model and what was edited; raises as the pass does."""
        return self.inner.apply(model)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """The pass's verb, as onnx_ir calls it."""
        result = self.apply(model)
        same = result.graph is model and not self.in_place  # onnx_ir wants another object, changed or not
        return ir.passes.PassResult(model.clone() if same else result.graph, result.modified)
