"""What is known of the Neural Engine's limits, as data, and a MIL program held against it.

Apple publishes advice and no list: the rules are what others measured, each with its source. They say what cannot stay
on the engine and what is slow there; which way Core ML decides is seen on a device alone.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from attnrewrite.targets.coreml.passes.narrow_kernels import WIDEST_KERNEL
from attnrewrite.targets.coreml.passes.views import WIDEST

Cost = Literal["leaves", "newer", "slow"]

LIMITS = "ane-guide.readthedocs.io, chapter 17 (measured on an M1)"
OPERATORS = "ane-guide.readthedocs.io, chapter 4"
APPLE = "Apple, Deploying Transformers on the Apple Neural Engine, 2022"
PLANS = "compute plans of published Whisper packages (mlcomputeplan.json): supported on the CPU alone"
HOLLANCE = "hollance/neural-engine, docs/unsupported-layers.md"

HALF = 2  # bytes of a float16 value
PADDED = 32  # float16 values in the 64 bytes that a last axis is padded to
TILE = 2**21  # bytes of on-chip memory
SMALLEST = 2.0**-24  # of float16
_NO_PATH = (
    "mod", "logical_and", "logical_or", "logical_xor", "reduce_prod", "scatter", "scatter_along_axis", "scatter_nd",
    "one_hot", "band_part", "shape", "non_zero", "lstm", "gru", "rnn", "cond", "while_loop",
)  # fmt: skip
_CONVOLUTIONS = ("conv", "conv_quantized", "conv_transpose")
_ON_CPU = ("gather", "gather_along_axis", "gather_nd", "topk")
_FROM_A14 = ("resize", "resize_bilinear", "resize_nearest_neighbor", "upsample_bilinear", "upsample_nearest_neighbor")
_FROM_A15 = ("sin", "cos")
_UNCOUNTED = ("const", "classify")  # a label is looked up after the program has run


@dataclass(frozen=True)
class Rule:
    """One limit. `broken` is given an operator; `cost` is to leave the engine, to need a newer one, or to be slow."""

    id: str
    what: str
    why: str
    source: str
    cost: Cost
    broken: Callable[[Any], bool]


def _tensors(operation: Any) -> Iterator[Any]:
    """The operator's operands that are computed, and what it makes."""
    for given in operation.inputs.values():
        for variable in given if isinstance(given, (list, tuple)) else (given,):
            if variable is not None and not is_constant(variable):
                yield variable
    yield from operation.outputs


def is_constant(variable: Any) -> bool:
    """Whether a program holds the value, as it is or compressed."""
    compressed = variable.op is not None and variable.op.op_type.startswith("constexpr_")
    return compressed or variable.val is not None


def _size(length: Any) -> int:
    """The length of an axis; 0 where it is open."""
    return int(length) if isinstance(length, (int, np.integer)) else 0


def _kind(*names: str) -> Callable[[Any], bool]:
    return lambda operation: operation.op_type in names


def _rank_over(most: int, *names: str) -> Callable[[Any], bool]:
    return lambda operation: (
        (not names or operation.op_type in names) and any(each.rank > most for each in _tensors(operation))
    )


def _type(variable: Any) -> str:
    from coremltools.converters.mil.mil import types

    return str(types.builtin_to_string(variable.dtype))


def _wide_type(operation: Any) -> bool:
    # A program's inputs and outputs are cast at its edges, which is Core ML's own doing.
    return operation.op_type != "cast" and any(_type(each) in ("fp32", "int32") for each in _tensors(operation))


def _is_open(operation: Any) -> bool:
    return any(not _size(length) for each in _tensors(operation) for length in each.shape)


def _tiny_epsilon(operation: Any) -> bool:
    epsilon = operation.inputs.get("epsilon")
    return epsilon is not None and epsilon.val is not None and 0 <= float(epsilon.val) < SMALLEST


def _wide_kernel(operation: Any) -> bool:
    return operation.op_type in _CONVOLUTIONS and _size(operation.inputs["weight"].shape[-1]) > WIDEST_KERNEL


def _mostly_padding(operation: Any) -> bool:
    def rows(shape: Sequence[Any]) -> int:
        return math.prod(map(_size, shape[:-1])) if len(shape) > 1 and 0 < _size(shape[-1]) <= PADDED // 2 else 0

    return any(HALF * PADDED * rows(each.shape) > TILE for each in operation.outputs)


def _over_tile(operation: Any) -> bool:
    # Weights are no live operands: they stream through in any case.
    return any(HALF * math.prod(map(_size, each.shape)) > TILE for each in _tensors(operation) if each.rank)


def _moves_batch(operation: Any) -> bool:
    return operation.op_type == "transpose" and int(operation.inputs["perm"].val[0]) != 0


RULES = (
    Rule("rank", "a tensor of more than five axes", "no layout for it", LIMITS, "leaves", _rank_over(5)),
    Rule(
        "linear-rank",
        "a linear layer of rank 5",
        "its input has at most four axes",
        LIMITS,
        "leaves",
        _rank_over(4, "linear"),
    ),
    Rule(
        "product-rank",
        "a product of rank 5",
        "products have at most four axes",
        LIMITS,
        "leaves",
        _rank_over(4, "matmul"),
    ),
    Rule(
        "axis-length",
        f"a height or width above {WIDEST}",
        "the engine's counters end there",
        LIMITS,
        "leaves",
        lambda operation: any(_size(size) > WIDEST for each in _tensors(operation) for size in each.shape[-2:]),
    ),
    Rule(
        "kernel-width",
        f"a convolution kernel wider than {WIDEST_KERNEL}",
        "wider ones are rejected: a sum of narrower ones stays",
        LIMITS,
        "leaves",
        _wide_kernel,
    ),
    Rule(
        "no-path",
        "an operator that the engine lacks",
        "no hardware path on any chip",
        OPERATORS,
        "leaves",
        _kind(*_NO_PATH),
    ),
    Rule(
        "gather",
        "a gather or top-k",
        "placed on the CPU: slices and a concat stay",
        PLANS,
        "leaves",
        _kind(*_ON_CPU),
    ),
    Rule("wide-type", "float32 or int32 values", "the engine computes in float16", LIMITS, "leaves", _wide_type),
    Rule(
        "open-shape",
        "an axis of unknown length",
        "programs are compiled for fixed shapes",
        HOLLANCE,
        "leaves",
        _is_open,
    ),
    Rule(
        "epsilon",
        "an epsilon below 6e-8",
        "it is zero in float16, and the division by zero is avoided elsewhere",
        LIMITS,
        "leaves",
        _tiny_epsilon,
    ),
    Rule("resize", "a resize or upsampling", "the sampler came with the A14", OPERATORS, "newer", _kind(*_FROM_A14)),
    Rule("sine", "a sine or cosine", "they came with the A15", OPERATORS, "newer", _kind(*_FROM_A15)),
    Rule(
        "padding",
        f"a last axis of {PADDED // 2} values or fewer, whose padding takes it off the chip",
        "it is padded to 64 bytes: what is mostly waste should stay in the on-chip memory at least",
        APPLE,
        "slow",
        _mostly_padding,
    ),
    Rule(
        "tile",
        "values above 2 MB",
        "an operand that is no weight does not fit the on-chip memory and is cut into tiles",
        LIMITS,
        "slow",
        _over_tile,
    ),
    Rule("transpose", "a transpose", "a copy through memory", APPLE, "slow", _kind("transpose")),
    Rule("transpose-batch", "a transpose of the first axis", "the slowest of copies", APPLE, "slow", _moves_batch),
)


@dataclass(frozen=True)
class Counted:
    """An operator of a program: its multiply-adds, and the ids of the rules that it breaks."""

    name: str
    kind: str
    multiply_adds: int
    broken: tuple[str, ...]


@dataclass(frozen=True)
class EngineReport:
    """A program against the rules."""

    operators: tuple[Counted, ...]

    @property
    def multiply_adds(self) -> int:
        return sum(each.multiply_adds for each in self.operators)

    def breaking(self, rule: str) -> tuple[Counted, ...]:
        return tuple(each for each in self.operators if rule in each.broken)

    def leaving(self) -> tuple[Counted, ...]:
        """The operators that a rule takes off the engine."""
        taken = {rule.id for rule in RULES if rule.cost == "leaves"}
        return tuple(each for each in self.operators if not taken.isdisjoint(each.broken))

    def staying(self) -> tuple[float, float]:
        """The shares of multiply-adds and of operators that no rule takes off the engine, from 0 to 1."""
        leaving = self.leaving()
        adds = self.multiply_adds - sum(each.multiply_adds for each in leaving)
        kept = len(self.operators) - len(leaving)
        return (
            adds / self.multiply_adds if self.multiply_adds else 1.0,
            kept / len(self.operators) if self.operators else 1.0,
        )

    def sentence(self) -> str:
        adds, operators = self.staying()
        told = [(rule, len(self.breaking(rule.id))) for rule in RULES]
        leaving = ", ".join(f"{rule.what} ({count})" for rule, count in told if count and rule.cost == "leaves")
        transposes = len(self.breaking("transpose"))
        return (
            f"by known rules {adds:.1%} of multiply-adds and {operators:.1%} of {len(self.operators)} operators stay "
            f"on the Neural Engine{f', not: {leaving}' if leaving else ''}; {transposes} transposes"
        )


def lint(program: Any) -> EngineReport:
    """The main function of a MIL program, loaded or in memory, held against every rule."""
    return EngineReport(
        tuple(
            Counted(
                str(operation.name), operation.op_type, multiply_adds(operation),
                tuple(rule.id for rule in RULES if rule.broken(operation)),
            )
            for operation in program.functions["main"].operations
            if operation.op_type not in _UNCOUNTED and not operation.op_type.startswith("constexpr_")
        )
    )  # fmt: skip


def multiply_adds(operation: Any) -> int:
    """Of products and convolutions; 0 for any other operator."""
    made = math.prod(map(_size, operation.outputs[0].shape)) if operation.outputs else 0
    given = operation.inputs
    if operation.op_type in ("linear", "conv"):
        return made * math.prod(given["weight"].shape[1:])
    if operation.op_type == "conv_transpose":
        return math.prod(map(_size, given["x"].shape)) * math.prod(given["weight"].shape[1:])
    if operation.op_type == "matmul":
        turned = bool(given["transpose_x"].val)
        return made * _size(given["x"].shape[-2 if turned else -1])
    return made * _size(given["values"][0].shape[-1]) if operation.op_type == "einsum" else 0
