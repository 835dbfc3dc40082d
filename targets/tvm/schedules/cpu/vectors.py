"""Arithmetic on vectors, in TIR: loads and stores, and functions that other compilers call a library for.

It is of float32, whatever type buffers are of, but for what asks for another: sums, products and what `half` has.

`exp` and `erf` are within 2 units in the last place, `gelu` within 4 of its argument's: polynomials fitted for this
file (least squares, reweighted for the smallest largest error, coefficients rounded to float32 one after the other).
What is not a number stays none: of `maximum(a, b)` and `minimum(a, b)` it is to be `b`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.tirx.script.builder import ir as T

from attnrewrite.targets.tvm.schedules.profile import FLOAT32

Value = Any  # a TIR expression: a scalar, or a vector of some lanes
Position = Any  # a TIR expression of an index, or an int

LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440054690583e-4  # the first with few enough bits for exact products
EXP = (1.0, 1.0, 0.4999999403953552, 0.1666652113199234, 0.04166827350854874, 0.008368685841560364, 0.00138201355002)
EXP2 = (
    *(1.0, 0.6931471824645996, 0.24022647738456726, 0.05550359934568405),
    *(0.009618506766855717, 0.001339080510661006, 0.0001532609312562272),
)
LEAST_NORMAL = -87.3  # below, the exponential is no normal number: 0 here
OVERFLOW = 89.0
ERF_NEAR = (
    *(0.12837916612625122, -0.3761262595653534, 0.11283578723669052, -0.026853347197175026),
    *(0.005187162198126316, -0.0007997853099368513, 7.806903158780187e-05),
)  # erf(x) = x + x p(x^2) below 1
ERF_FAR = (
    *(1.128480076789856, 0.635831356048584, 0.10511629283428192),
    *(-0.022798558697104454, 0.003186976769939065, -0.00021064704924356192),
)  # erf(x) = 1 - exp(-x p(x)) from 1 to 3.95
ERF_ONE = 3.95  # from here on, erf is 1 in float32
GELU_END = 5.36  # below its negative, gelu(x) is 0; above it, x: there, what is computed rounds to these
GELU_OVER = (0.39894223, 0.033156976, 0.0045325435, 0.00015526562, 5.1320826e-06)
GELU_UNDER = (1.0, 0.24977797, 0.027992792, 0.0017848857, 6.53083e-05, 7.395473e-07, -1.8326288e-09)
# gelu(x) = x (1/2 + x over(x^2) / under(x^2)) between
TANH_NEAR = (
    *(-0.3333328068256378, 0.1333141028881073, -0.05373726785182953),
    *(0.02063172310590744, -0.005697345826774836),
)  # tanh(x) = x + x^3 p(x^2) below 0.625
TANH_SPLIT = 0.625
MOST_APART = 4  # places between neighbours of a vector: farther ones are loaded one by one


def splat(value: Value | float, lanes: int, dtype: str = FLOAT32) -> Value:
    """A vector with the same number in every lane; a scalar where `lanes` is 1. A Python number becomes a `dtype`."""
    scalar = tirx.const(value, dtype) if isinstance(value, int | float) else value
    return scalar if lanes == 1 else tirx.Broadcast(scalar, lanes)


def lanes_of(value: Value) -> int:
    return int(value.ty.dtype.lanes)


def type_of(value: Value) -> str:
    """The type of a vector's numbers."""
    return str(value.ty.dtype).partition("x")[0]


def typed(dtype: str, vector: Value) -> str:
    """The type of as many numbers as a vector has."""
    return _like(dtype, lanes_of(vector))


def like(vector: Value, number: float) -> Value:
    """A number of a vector's type in as many lanes."""
    return splat(number, lanes_of(vector), type_of(vector))


def load(buffer: Any, at: Position, lanes: int, stride: int = 1, dtype: str = FLOAT32) -> Value:
    """`lanes` numbers from `at` on, `stride` apart, as `dtype`; the same one in every lane where `stride` is 0."""
    if lanes == 1 or stride == 0:
        return splat(as_type(buffer[at], dtype), lanes)
    if 1 < stride <= MOST_APART:
        return as_type(_shuffled(buffer, at, lanes, stride), dtype)
    return as_type(tirx.BufferLoad(buffer, [tirx.Ramp(at, stride, lanes)]), dtype)


def _shuffled(buffer: Any, at: Position, lanes: int, stride: int) -> Value:
    """Numbers that lie a little apart, out of whole vectors that end where the last of them does."""
    reach = (lanes - 1) * stride + 1
    begins = [min(part * lanes, reach - lanes) for part in range(stride)]
    places = [number * stride for number in range(lanes)]
    parts = [min(place // lanes, stride - 1) for place in places]
    whole = [tirx.BufferLoad(buffer, [tirx.Ramp(at + begin, 1, lanes)]) for begin in begins]
    chosen = [part * lanes + place - begins[part] for part, place in zip(parts, places, strict=True)]
    return tirx.Shuffle(whole, chosen)


def as_type(value: Value, dtype: str) -> Value:
    """The numbers of a vector rounded to a type; integers as they are."""
    found, wanted = str(value.ty.dtype), _like(dtype, lanes_of(value))
    return T.Cast(wanted, value) if found != wanted and found.startswith("float") else value


def lane(vector: Value, number: int) -> Value:
    """One number of a vector."""
    return tirx.Shuffle([vector], [number])


def transposed(rows: Sequence[Value]) -> list[Value]:
    """The columns of a square: as many vectors as lanes, a power of two."""
    count = len(rows)
    half, found = count // 2, list(rows)
    # Shuffled perfectly as often as a lane's number has bits, rows and columns have changed places.
    for _ in range(count.bit_length() - 1):
        pairs = zip(found[:half], found[half:], strict=True)
        found = [name(_zipped(one, other, part)) for one, other in pairs for part in range(2)]
    return found


def _zipped(one: Value, other: Value, part: int) -> Value:
    """The numbers of two vectors in turns: those of the first or second half of each."""
    lanes = lanes_of(one)
    begin = part * lanes // 2
    return tirx.Shuffle([one, other], [at + which for at in range(begin, begin + lanes // 2) for which in (0, lanes)])


def store(buffer: Any, at: Position, value: Value, lanes: int, stride: int = 1) -> None:
    """Write a vector, rounded to the buffer's type."""
    T.buffer_store(buffer, as_type(value, str(buffer.dtype)), [at if lanes == 1 else tirx.Ramp(at, stride, lanes)])


def name(value: Value) -> Value:
    """The value, computed once however often it is read."""
    return value if isinstance(value, int) else T.bind(value)


def number(value: Value) -> Value:
    """Integers as float32."""
    return T.Cast(_like("float32", lanes_of(value)), value)


def select(condition: Value, one: Value, other: Value) -> Value:
    return tirx.Select(condition, one, other)


def polynomial(x: Value, coefficients: Sequence[float]) -> Value:
    """sum_i coefficients[i] x^i, by Horner's rule: a chain of multiply-adds."""
    return functools.reduce(lambda sum_, c: sum_ * x + like(x, c), coefficients[-2::-1], like(x, coefficients[-1]))


def polynomial_by_pairs(x: Value, coefficients: Sequence[float]) -> Value:
    """The same by Estrin's scheme: more products, fewer constants that are to be copied before they are added to."""
    square = name(x * x)
    pairs = [coefficients[begin : begin + 2] for begin in range(0, len(coefficients), 2)]
    terms = [name(like(x, pair[1]) * x + like(x, pair[0])) if len(pair) == 2 else like(x, pair[0]) for pair in pairs]
    return functools.reduce(lambda sum_, term: name(sum_ * square + term), terms[-2::-1], terms[-1])


def exp(x: Value) -> Value:
    """e^x; 0 where that is no normal number, as denormal ones would slow down whatever reads them."""
    lanes = lanes_of(x)
    bounded = name(minimum(splat(OVERFLOW, lanes), maximum(splat(LEAST_NORMAL, lanes), x)))
    power = name(T.floor(bounded * splat(1 / math.log(2), lanes) + splat(0.5, lanes)))
    rest = name(bounded - power * splat(LN2_HIGH, lanes) - power * splat(LN2_LOW, lanes))
    whole = name(T.Cast(_like("int32", lanes), power))
    part = name(T.shift_right(whole, integers(1, lanes)))
    # In two factors, as 2^128 is not a number of the type.
    result = polynomial(rest, EXP) * _power_of_two(part, lanes) * _power_of_two(whole - part, lanes)
    return name(select(x < splat(LEAST_NORMAL, lanes), splat(0.0, lanes), result))


def falling_power(x: Value, least: float) -> Value:
    """2^x for x of at most 0; 0 for x below `least`, of at least -126."""
    lanes = lanes_of(x)
    power = name(T.nearbyint(x))
    bits = T.reinterpret(_like("int32", lanes), name(polynomial_by_pairs(name(x - power), EXP2)))
    exponent = T.shift_left(T.Cast(_like("int32", lanes), power), integers(23, lanes))
    result = T.reinterpret(_like("float32", lanes), bits + exponent)
    return name(select(x < splat(least, lanes), splat(0.0, lanes), result))


def falling_exp(x: Value, least: float = LEAST_NORMAL) -> Value:
    """e^x for x of at most 0, with fewer steps; 0 for x below `least`."""
    lanes = lanes_of(x)
    power = name(T.nearbyint(x * splat(1 / math.log(2), lanes)))
    rest = name(x - power * splat(LN2_HIGH, lanes) - power * splat(LN2_LOW, lanes))
    # The power is added to the exponent's bits.
    exponent = T.shift_left(T.Cast(_like("int32", lanes), power), integers(23, lanes))
    bits = T.reinterpret(_like("int32", lanes), name(polynomial(rest, EXP))) + exponent
    result = T.reinterpret(_like("float32", lanes), bits)
    return name(select(x < splat(least, lanes), splat(0.0, lanes), result))


def erf(x: Value) -> Value:
    lanes = lanes_of(x)
    size = name(minimum(splat(ERF_ONE, lanes), T.abs(x)))
    near = x + x * polynomial(name(x * x), ERF_NEAR)
    far = splat(1.0, lanes) - falling_exp(name(splat(0.0, lanes) - size * polynomial(size, ERF_FAR)))
    signed = select(x < splat(0.0, lanes), splat(0.0, lanes) - far, far)
    return name(select(size > splat(1.0, lanes), signed, near))


def tanh(x: Value) -> Value:
    lanes = lanes_of(x)
    square = name(x * x)
    near = x + x * square * polynomial(square, TANH_NEAR)
    two = splat(2.0, lanes)
    far = splat(1.0, lanes) - two / (exp(x * two) + splat(1.0, lanes))
    return name(select(T.abs(x) > splat(TANH_SPLIT, lanes), far, near))


def sigmoid(x: Value) -> Value:
    one = splat(1.0, lanes_of(x))
    return one / (one + exp(splat(0.0, lanes_of(x)) - x))


def gelu(x: Value) -> Value:
    """x times the normal distribution's integral up to x."""
    lanes = lanes_of(x)
    inner = name(bounded(x, GELU_END))
    square = name(inner * inner)
    # Vectors of four are NEON's, where multiply-adds overwrite what is added to.
    series = polynomial_by_pairs if lanes == 4 else polynomial
    share = inner * series(square, GELU_OVER) / series(square, GELU_UNDER) + splat(0.5, lanes)
    return name(x * share)


def maximum(one: Value, other: Value) -> Value:
    return tirx.Max(one, other)


def larger(one: Value, other: Value) -> Value:
    """The larger of two numbers; of one and none the one."""
    return T.call_llvm_pure_intrin(str(one.ty.dtype), "llvm.maxnum", one, other)


def smaller(one: Value, other: Value) -> Value:
    """The smaller of two numbers; of one and none the one."""
    return T.call_llvm_pure_intrin(str(one.ty.dtype), "llvm.minnum", one, other)


def bounded(x: Value, end: float) -> Value:
    """The nearest number from -end to end; of none one of them, which processors find in a single step."""
    return smaller(larger(x, like(x, -end)), like(x, end))


def minimum(one: Value, other: Value) -> Value:
    return tirx.Min(one, other)


def relu(x: Value) -> Value:
    return maximum(splat(0.0, lanes_of(x)), x)


def chosen(compare: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    """One value where two others compare so, another where they do not."""
    return lambda one, other, then, otherwise: select(compare(one, other), then, otherwise)


COMPARISONS: dict[str, Callable[[Value, Value], Value]] = {
    "equal": lambda one, other: tirx.EQ(one, other),
    "greater": lambda one, other: one > other,
    "greater_equal": lambda one, other: one >= other,
    "less": lambda one, other: one < other,
    "less_equal": lambda one, other: one <= other,
    "not_equal": lambda one, other: tirx.NE(one, other),
}
# What expressions are made of.
OPERATIONS: dict[str, Callable[..., Value]] = {
    **{f"where_{name}": chosen(compare) for name, compare in COMPARISONS.items()},
    "abs": T.abs,
    "add": lambda one, other: one + other,
    "ceil": T.ceil,
    "cos": T.cos,
    "divide": lambda one, other: one / other,
    "erf": erf,
    "exp": exp,
    "floor": T.floor,
    "gelu": gelu,
    "log": T.log,
    "maximum": maximum,
    "minimum": minimum,
    "multiply": lambda one, other: one * other,
    "negative": lambda x: splat(0.0, lanes_of(x)) - x,
    "power": T.pow,
    "relu": relu,
    "round": T.nearbyint,
    "rsqrt": lambda x: splat(1.0, lanes_of(x)) / T.sqrt(x),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "sin": T.sin,
    "sqrt": T.sqrt,
    "square": lambda x: x * x,
    "subtract": lambda one, other: one - other,
    "tanh": tanh,
}


def pieces(length: int, lanes: int) -> list[tuple[int, int]]:
    """`length` numbers as vectors (begin, lanes): full ones, then halves of halves for the rest."""
    found, begin, width = [], 0, lanes
    while begin < length:
        while width > length - begin:
            width //= 2
        found.append((begin, width))
        begin += width
    return found


def covering(length: int, lanes: int) -> list[tuple[int, int]]:
    """`length` numbers as the fewest vectors (begin, lanes) of one width, the last of which may share some with the one
    before: not for sums that are added to, but nothing is left that a compiler would take for scalars.
    """
    width = min(lanes, 1 << length.bit_length() - 1)
    return [(min(begin, length - width), width) for begin in range(0, length, width)]


def _like(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def _power_of_two(exponent: Value, lanes: int) -> Value:
    bits = T.shift_left(exponent + integers(127, lanes), integers(23, lanes))
    return T.reinterpret(_like("float32", lanes), bits)


def integers(value: int, lanes: int, dtype: str = "int32") -> Value:
    """A vector of integers with the same one in every lane."""
    scalar = tirx.const(value, dtype)
    return scalar if lanes == 1 else tirx.Broadcast(scalar, lanes)
