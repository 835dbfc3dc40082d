"""Functions of float16 vectors whose result would be rounded to float16 anyway: twice the lanes, shorter polynomials.

Where multiply-adds round once, `falling_power` is off by at most 1.1 units and `sigmoid` by 1.6; `gelu` by 1.2 and
`silu` by 2.0 for an argument of up to 1 in size, by as many times more as it is larger. Where products and sums are
rounded each, `falling_power` and `gelu` are off by 1.4. A unit is 2^-11, half a place of the numbers from 1 to 2. The
coefficients were fitted for this file (least largest error), then searched among the float16 numbers near those for the
least error at any float16 argument. What is not a number stays none.
"""

import math
from collections.abc import Callable

from tvm.tirx.script.builder import ir as T

from attnrewrite.targets.tvm.schedules.cpu.vectors import (
    Value,
    integers,
    lanes_of,
    like,
    name,
    polynomial_by_pairs,
    select,
    smaller,
    typed,
)
from attnrewrite.targets.tvm.schedules.profile import FLOAT16

INT16 = "int16"
NOTHING = -25  # 2^-25 is rounded to 0
SCALE = 2.0**11  # times that, powers from there on have all their digits
EXP2 = (2048.0, 1420.0, 496.0, 112.7)  # SCALE 2^x
DIGITS = 10  # behind the first one
GELU_END = 3.75  # from here on, gelu(x) is x to float16's digits
GELU_ROOT = (0.705, -0.2664, -0.09393, 0.06366, -0.01072, 0.0005116)  # of the normal distribution's integral beyond |x|


def falling_power(x: Value) -> Value:
    """2^x for x of at most 0."""
    bounded = name(_at_least(NOTHING, x))
    power = name(T.nearbyint(bounded))
    bits = T.reinterpret(typed(INT16, x), name(polynomial_by_pairs(name(bounded - power), EXP2)))
    exponent = T.shift_left(T.Cast(typed(INT16, x), power), integers(DIGITS, lanes_of(x), INT16))
    return name(T.reinterpret(typed(FLOAT16, x), bits + exponent) * like(x, 1 / SCALE))


def gelu(x: Value) -> Value:
    """x times the normal distribution's integral up to x; -4.7e-6 far below zero.

    It is what is positive of x, less |x| times the integral beyond |x|, the square of a polynomial.
    """
    size = name(smaller(T.abs(x), like(x, GELU_END)))
    root = name(polynomial_by_pairs(size, GELU_ROOT))
    return name(_at_least(0.0, x) - size * name(root * root))


def sigmoid(x: Value) -> Value:
    falling = falling_power(name(T.abs(x) * like(x, -math.log2(math.e))))
    return name(select(x < like(x, 0.0), falling, like(x, 1.0)) / (falling + like(x, 1.0)))


def silu(x: Value) -> Value:
    return name(x * sigmoid(x))


def _at_least(least: float, x: Value) -> Value:
    """The larger of two numbers; none where x is, in a single step."""
    return T.call_llvm_pure_intrin(str(x.ty.dtype), "llvm.maximum", x, like(x, least))


# Those of `vectors.OPERATIONS` that there are for float16.
OPERATIONS: dict[str, Callable[..., Value]] = {"gelu": gelu, "sigmoid": sigmoid, "silu": silu}
