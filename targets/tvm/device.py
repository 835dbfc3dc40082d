"""A module compiled for a GPU as the kernels it launches. Written for TVM 0.27.

It hides: tvm.s_tir.dlight and its rules; tvm.ir.instrument.pass_instrument and the names of the passes CallTIRRewrite
and tirx.SplitHostDevice, after which main is a straight line of allocations and calls, and each called function one of
kernel launches; the classes of Relax expressions, and PyExprMutator, which walks them; and the operators
relax.builtin.alloc_tensor, relax.reshape and tirx.call_ffi_kernel.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnrewrite.targets.runners.opencl import DeviceProgram, Launch, Output
from attnrewrite.targets.runners.programs import Unavailable
from attnrewrite.targets.tvm import compat as tvm_compat

MAIN_PASS = "CallTIRRewrite"
KERNELS_PASS = "tirx.SplitHostDevice"
LONGEST_NAME = 100  # characters of a function's name; its kernels' names are a little longer


@dataclass(frozen=True)
class Compiled:
    """What TVM made: the executable, and the stages on the way that say what it will launch."""

    executable: Any
    main: Any
    functions: Any


def build(relax_module: Any, device: Mapping[str, Any]) -> Compiled:
    """Compile a Relax module for a GPU's description with TVM's default pipeline."""
    import tvm
    from tvm.ir.instrument import pass_instrument

    seen: dict[str, Any] = {}

    @pass_instrument
    class Watch:
        def run_after_pass(self, module: Any, info: Any) -> None:
            if str(info.name) in (MAIN_PASS, KERNELS_PASS):
                seen[str(info.name)] = module

    level = tvm.transform.PassContext.current().opt_level
    with tvm.transform.PassContext(opt_level=level, instruments=[Watch()]):
        executable = tvm_compat.build(_scheduled(relax_module, device), device)
    return Compiled(executable, seen[MAIN_PASS]["main"], seen[KERNELS_PASS])


def _scheduled(relax_module: Any, device: Mapping[str, Any]) -> Any:
    """The module after the first passes of TVM's pipeline for GPUs, which then leaves what has a schedule alone.

    Its GEMV rule raises where the reduced length divides badly (one query over 257 tokens), its Matmul rule where the
    reading of an operand cannot be inlined. A rule that raises counts here as one that does not apply, and the next
    has its turn.
    """
    import tvm
    from tvm.s_tir import dlight

    class Cautious(dlight.ScheduleRule):
        def __init__(self, rule: Any) -> None:
            self.rule = rule

        def apply(self, func: Any, target: Any, tunable: bool) -> Any:
            try:
                return self.rule.apply(func, target, tunable)
            except (ValueError, AssertionError, AttributeError):
                return None

    gpu, relax = dlight.gpu, tvm.relax
    rules = (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Fallback())
    passes = (
        relax.backend.DispatchSampling(),
        relax.backend.DispatchSortScan(),
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        dlight.ApplyDefaultSchedule(*map(Cautious, rules)),
    )
    with tvm.target.Target(dict(device)):
        return _briefly_named(tvm.transform.Sequential(passes)(relax_module))


def _briefly_named(module: Any) -> Any:
    """The module with no function's name longer than LONGEST_NAME: drivers keep kernels by name, and cut long ones off.

    TVM names a fused function after everything in it, so that two which begin alike would become one.
    """
    import tvm
    from tvm.relax.expr_functor import PyExprMutator, mutator

    @mutator
    class Renamed(PyExprMutator):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(module)
            long = [name for name in module.get_global_vars() if len(name.name_hint) > LONGEST_NAME]
            self.brief = {name.name_hint: self.named(module[name], f"fused_{i}") for i, name in enumerate(long)}

        def named(self, function: Any, name: str) -> Any:
            return self.builder_.add_func(function.with_attr("global_symbol", name), name)

        def visit_global_var_(self, var: Any) -> Any:
            return self.brief.get(var.name_hint, var)

    renamed = Renamed()
    main = module.get_global_var("main")
    renamed.builder_.update_func(main, renamed.visit_expr(module[main]))
    return tvm.relax.transform.DeadCodeElimination(["main"])(renamed.builder_.get())


def device_program(compiled: Compiled) -> DeviceProgram:
    """What the compiled module launches.

    Raises:
        Unavailable: it does more than launch kernels.
    """
    source = tvm_compat.kernel_sources(compiled.executable, "opencl")
    return _Reader(compiled.functions).read(compiled.main, source)


class _Reader:
    """Follows main and gives every buffer that it touches a name. One reader reads one program."""

    def __init__(self, functions: Any) -> None:
        self.functions = {name.name_hint: function for name, function in functions.functions.items()}
        self.values: dict[int, Any] = {}
        self.sizes: dict[str, int] = {}
        self.constants: dict[str, Any] = {}
        self.launches: list[Launch] = []

    def read(self, main: Any, source: str) -> DeviceProgram:
        inputs = tuple(self.allocate(parameter.ty.shape, parameter.ty.dtype) for parameter in main.params)
        self.values.update({hash(parameter): name for parameter, name in zip(main.params, inputs, strict=True)})
        for block in main.body.blocks:
            for binding in block.bindings:
                self.values[hash(binding.var)] = self.value(binding.value)
        result = main.body.body
        outputs = tuple(
            Output(name, tuple(map(int, field.shape)), str(field.dtype))
            for name, field in zip(self.value(result), result.ty.fields, strict=True)
        )
        return DeviceProgram(inputs, self.constants, self.sizes, tuple(self.launches), outputs, source)

    def value(self, expression: Any) -> Any:
        """The buffer's name, or the tuple of names, that a Relax expression stands for; launches on the way."""
        kind = type(expression).__name__
        if kind == "Var":
            return self.values[hash(expression)]
        if kind == "Tuple":
            return tuple(self.value(field) for field in expression.fields)
        if kind == "TupleGetItem":
            return self.value(expression.tuple_value)[expression.index]
        if kind == "GenericConst":
            return self.constant(expression)
        if kind == "Call":
            return self.call(expression)
        raise Unavailable(f"the program holds {kind}, which is no kernel launch")

    def call(self, call: Any) -> Any:
        name = getattr(call.op, "name", None)
        if name == "relax.builtin.alloc_tensor":
            return self.allocate(call.ty.shape, call.ty.dtype)
        if name == "relax.reshape":
            return self.value(call.args[0])
        function = self.functions.get(getattr(call.op, "name_hint", None))
        if function is None:
            raise Unavailable(f"the program calls {name or call.op}, which is no kernel launch")
        return self.run(function, [self.value(argument) for argument in call.args])

    def run(self, function: Any, arguments: list[str]) -> None:
        """Record the launches of a function: declarations and allocations of buffers, then calls of kernels."""
        pointers = {hash(parameter): name for parameter, name in zip(function.params, arguments, strict=True)}
        for statement in getattr(function.body, "seq", [function.body]):
            kind = type(statement).__name__
            if kind == "AllocBuffer":
                buffer = statement.buffer
                pointers[hash(buffer)] = self.allocate(buffer.shape, buffer.dtype)
            elif kind == "DeclBuffer":
                pointers[hash(statement.buffer)] = pointers[_pointer(statement.data)]
            elif kind == "Evaluate" and getattr(statement.value.op, "name", None) == "tirx.call_ffi_kernel":
                self.launches.append(_launch(statement.value, pointers))
            else:
                raise Unavailable(f"the program's host code holds {kind}, which is no kernel launch")

    def allocate(self, shape: Any, dtype: Any) -> str:
        name = f"b{len(self.sizes)}"
        self.sizes[name] = math.prod(map(int, shape)) * np.dtype(str(dtype)).itemsize
        return name

    def constant(self, constant: Any) -> str:
        values = constant.value.numpy()
        name = self.allocate(values.shape, values.dtype)
        self.constants[name] = values
        return name


def _launch(call: Any, pointers: Mapping[int, str]) -> Launch:
    axes = list(map(str, call.attrs.launch_params))
    kernel, *arguments = call.args
    buffers, extents = arguments[: -len(axes)], dict(zip(axes, map(int, arguments[-len(axes) :]), strict=True))
    block = [extents.pop(f"threadIdx.{axis}", 1) for axis in "xyz"]
    grid = [extents.pop(f"blockIdx.{axis}", 1) for axis in "xyz"]
    if extents:
        raise Unavailable(f"kernel {kernel.value} is launched with {', '.join(extents)}")
    x, y, z = (count * size for count, size in zip(grid, block, strict=True))
    names = tuple(pointers[_pointer(buffer)] for buffer in buffers)
    return Launch(str(kernel.value), names, (x, y, z), (block[0], block[1], block[2]))


def _pointer(expression: Any) -> int:
    """The buffer whose data a pointer expression is."""
    return hash(expression.args[0] if type(expression).__name__ == "Call" else expression)
