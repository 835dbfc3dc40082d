"""Kernels in the operators' place: a walk from the results back, each value given to the first rule that takes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from attnrewrite.errors import Refusal
from attnrewrite.targets.record import Decision
from attnrewrite.targets.tvm.schedules.graph import Graph, is_float, multiply_adds, shape, variables
from attnrewrite.targets.tvm.schedules.moves_last import moves_last
from attnrewrite.targets.tvm.schedules.profile import FLOAT32, Profile
from attnrewrite.targets.tvm.schedules.rule import Argument, Call, Function, Kernel, Rule, Step, Temporary
from attnrewrite.targets.tvm.schedules.spelling import written_out

FALLBACK = "TVM's default"
# What a rule says when the value is simply not of its kind; any other reason is worth telling.
NOT_MINE = ("other-operator", "no-arithmetic")


@dataclass(frozen=True)
class Scheduled:
    """A module with kernels in it, and what became of each of its values."""

    module: Any
    decisions: tuple[Decision, ...]


def rewrite(module: Any, rules: Sequence[Rule], profile: Profile) -> Scheduled:
    """Give every value that is needed to the first of `rules` that takes it; the others stay as they are.

    The module is one of fixed shapes with its weights inside, its main one block of dataflow; another comes back as it
    is, with a decision that says so.
    """
    refusal = _unreadable(module)
    if refusal is not None:
        return Scheduled(module, (Decision("main", ("function",), (), FALLBACK, 0, 0.0, str(refusal)),))
    module = moves_last(written_out(module))
    graph = Graph(module)
    kernels: dict[Any, Kernel] = {}
    found: list[_Found] = []
    needed = set(variables(graph.main.body.body))
    for binding in reversed(graph.block.bindings):
        var = binding.var
        if var not in needed:
            continue
        rule, outcome, before = _choose(Call(graph, var, graph.operator(var)), rules, profile)
        if isinstance(outcome, Kernel):
            kernels[var] = outcome
            found.append(_Found(var, rule, None, outcome.covers, before))
            needed.update(base for step in outcome.steps for base in step.arguments if isinstance(base, relax.Var))
        else:
            if outcome is not None:
                found.append(_Found(var, FALLBACK, str(outcome), (var,)))
            needed.update(variables(binding.value))
    kept = [binding for binding in graph.block.bindings if binding.var in needed]
    return Scheduled(_Builder(module, graph, kept, kernels, profile).build(), _decisions(graph, found[::-1]))


def _unreadable(module: Any) -> Refusal | None:
    if not any(var.name_hint == "main" for var in module.get_global_vars()):
        return Refusal("no-main", "has no function of that name")
    blocks: Any = getattr(module["main"].body, "blocks", ())
    if len(blocks) != 1 or not isinstance(blocks[0], relax.DataflowBlock):
        return Refusal("control-flow", "is not one block of dataflow")
    if any(isinstance(binding, relax.MatchCast) for binding in blocks[0].bindings):
        return Refusal("shapes", "has shapes that are known only as it runs")
    return None


def _choose(
    call: Call, rules: Sequence[Rule], profile: Profile
) -> tuple[str, Kernel | Refusal | None, tuple[Refusal, ...]]:
    """The rule that takes a value, its kernel, and why rules that were asked before do not; else why none does, or None
    where there is nothing to compute.
    """
    if not isinstance(call.var.ty, relax.TensorType) or _is_free(call):
        return FALLBACK, None, ()
    if not is_float(call.var):
        return FALLBACK, Refusal("dtype", f"is {call.var.ty.dtype} or of unknown shape"), ()
    if 0 in shape(call.var):
        return FALLBACK, Refusal("empty", "has no elements"), ()
    told: list[Refusal] = []
    for rule in rules:
        outcome = rule.apply(call, profile)
        if isinstance(outcome, Kernel):
            return rule.name, outcome, tuple(told)
        if outcome.code not in NOT_MINE:
            told.append(outcome)
    return FALLBACK, told[0] if told else Refusal("no-rule", f"is {call.operator}, which no rule takes"), ()


def _is_free(call: Call) -> bool:
    """Whether a value is another one, or a whole one with another shape: nothing is computed."""
    value = call.graph.value(call.var)
    if call.graph.call(value, "relax.reshape", "relax.squeeze", "relax.expand_dims", "relax.flatten") is not None:
        return is_float(call.var) and not _computes_only_this(call, value.args[0])
    return not isinstance(value, relax.Call | relax.TupleGetItem)


def _computes_only_this(call: Call, operand: Any) -> bool:
    """Whether what is reshaped is read by nobody else: the kernel that computes it then writes the new shape."""
    return call.graph.is_sole(operand) and operand in call.graph.definitions


class _Builder:
    """Builds the new module. Equal functions on tensors of equal shapes are one, and so are equal calls on the way.

    What only kernels read is of the type that the processor stores; everything else stays of float32.
    """

    def __init__(
        self, module: Any, graph: Graph, kept: Sequence[Any], kernels: dict[Any, Kernel], profile: Profile
    ) -> None:
        self.module, self.graph, self.kept, self.kernels, self.profile = module, graph, kept, kernels, profile
        self.builder = relax.BlockBuilder(module)
        self.functions: dict[tuple[Function, tuple[Argument, ...]], Any] = {}
        self.made: dict[tuple[Function, tuple[Any, ...]], Any] = {}
        left = [binding.value for binding in kept if binding.var not in kernels]
        self.elsewhere = {var for value in (*left, graph.main.body.body) for var in variables(value)}
        self.written: dict[Any, Any] = {}

    def build(self) -> Any:
        bindings: list[Any] = []
        for binding in self.kept:
            if binding.var in self.kernels:
                bindings += self.calls(binding.var, self.kernels[binding.var])
            else:
                bindings.append(binding)
        main = self.graph.main
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], main.body.body)
        function = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
        self.builder.update_func(self.module.get_global_var("main"), function)
        return relax.transform.DeadCodeElimination(["main"])(self.builder.get())

    def calls(self, var: Any, kernel: Kernel) -> list[Any]:
        """A binding for each step that was not made before, the last one that of the value itself."""
        made: list[Any] = []
        written: list[Any] = []
        for step in kernel.steps:
            read = [self.read(base, written) for base in step.arguments]
            key = (step.function, tuple(id(base) if isinstance(base, np.ndarray) else base for base in read))
            last = step is kernel.steps[-1]
            if not last and key in self.made:
                written.append(self.made[key])
                continue
            elsewhere = last and var in self.elsewhere
            # One number for a row, as its unit is or a sum over it, costs little to keep whole.
            wide = elsewhere or (last and shape(var)[-1:] == (1,))
            dtype = FLOAT32 if wide else step.dtype or self.profile.stored
            call = self.call(step, [_argument(base) for base in read], dtype)
            name = str(var.name) if last else step.function.name
            written.append(var if elsewhere else relax.DataflowVar(name, call.ty))
            made.append(relax.VarBinding(written[-1], call))
            self.made[key] = written[-1]
        self.written[var] = written[-1]
        return made

    def read(self, base: Any, written: Sequence[Any]) -> Any:
        """What a step reads: an array, or the variable that holds what it asks for by now."""
        if isinstance(base, Temporary):
            return written[base.step]
        return base if isinstance(base, np.ndarray) else self.written.get(base, base)

    def call(self, step: Step, arguments: Sequence[Any], dtype: str) -> Any:
        read = (Argument(shape(argument), str(argument.ty.dtype)) for argument in arguments)
        key = (step.function, (*read, Argument(step.shape, dtype)))
        if key not in self.functions:
            function = step.function.build(key[1], self.profile)
            self.functions[key] = self.builder.add_func(function, step.function.name)
        out = relax.TensorType(step.shape, dtype)
        return self.builder.normalize(relax.call_tir(self.functions[key], relax.Tuple(list(arguments)), out_ty=out))


def _argument(base: Any) -> Any:
    return relax.const(np.ascontiguousarray(base)) if isinstance(base, np.ndarray) else base


@dataclass(frozen=True, eq=False)
class _Found:
    """What became of a value: the rule that took it, or the `reason` why none did; `covers` are the variables whose
    operators that computes, `before` the refusals of rules that were asked earlier.
    """

    var: Any
    rule: str
    reason: str | None
    covers: tuple[Any, ...]
    before: tuple[Refusal, ...] = ()


def _decisions(graph: Graph, found: Sequence[_Found]) -> tuple[Decision, ...]:
    counts = [sum(multiply_adds(graph, covered) for covered in each.covers) for each in found]
    total = sum(counts) or 1
    return tuple(
        Decision(
            value=str(each.var.name),
            operators=tuple(graph.operator(covered) for covered in each.covers),
            shape=shape(each.var) if is_float(each.var) else (),
            rule=each.rule,
            multiply_adds=count,
            share=count / total,
            reason=each.reason,
            before=tuple(map(str, each.before)),
        )
        for each, count in zip(found, counts, strict=True)
    )
