"""From a softmax back to the product query key^T that makes its scores, and forward to the product with the values."""

import math
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from attnrewrite.errors import Refusal
from attnrewrite.patterns.graph import ComputedConstants, GraphView, Operation
from attnrewrite.patterns.masks import masking, written_over
from attnrewrite.patterns.provenance import constant_factor, push


@dataclass(frozen=True)
class Joined:
    """A tensor `operand` that joins the scores at `value`, as a `Term` does: what is added, times `factor` by the time
    the softmax sees it, or the condition of a mask and what fills the places of masked scores by then.
    """

    value: str
    operand: str
    factor: float = 1.0
    dropped: bool | None = None
    filling: float = -math.inf

    def scaled(self, factor: float) -> "Joined":
        if self.dropped is None:
            return replace(self, factor=self.factor * factor)
        return replace(self, filling=self.filling * factor)


@dataclass(frozen=True)
class ScorePath:
    """From the product that makes the scores to the softmax's input: `path` in forward order, product excluded.

    `shift` is the number that was added to all scores: no softmax sees it, but what is then written over some of them
    differs from the others by that much less. `obstacles` say what else happens to the scores; with any of them there
    is no core. `certainty` is 2 where both operands of the product depend on the input, 1 where one is a learned
    constant.
    """

    product: str
    certainty: int
    path: tuple[str, ...] = ()
    scale: float = 1.0
    temperature: Joined | None = None
    terms: tuple[Joined, ...] = ()
    shift: float = 0.0
    talking_heads: bool = False
    obstacles: tuple[Refusal, ...] = ()

    def scaled(self, factor: float) -> "ScorePath":
        terms = tuple(term.scaled(factor) for term in self.terms)
        return replace(self, scale=self.scale * factor, terms=terms, shift=self.shift * factor)

    def joined(self, term: Joined) -> "ScorePath":
        return replace(self, terms=(*self.terms, term))

    def refused(self, obstacle: Refusal) -> "ScorePath":
        return replace(self, obstacles=(*self.obstacles, obstacle))


@dataclass(frozen=True)
class NoProduct:
    """Why walking back from a softmax found no product of queries and keys."""

    stopped_at: Operation


@dataclass(frozen=True)
class _Walk:
    """How many steps are left, and what was found from where: sums of sums have more paths than anyone can walk."""

    left: int
    memory: dict[tuple[str, int], ScorePath | NoProduct]

    def deeper(self) -> "_Walk":
        return _Walk(self.left - 1, self.memory)


def walk_back(graph: GraphView, value: str, depth: int = 64) -> ScorePath | NoProduct:
    """The best path from `value` back to a product, through movement, elementwise maps and the mixing of heads."""
    return _walk_back(graph, value, _Walk(depth, {}))


def _walk_back(graph: GraphView, value: str, walk: _Walk) -> ScorePath | NoProduct:
    key = value, walk.left
    if key not in walk.memory:
        walk.memory[key] = _step_back(graph, value, walk)
    return walk.memory[key]


def _step_back(graph: GraphView, value: str, walk: _Walk) -> ScorePath | NoProduct:
    operation = graph.operation(value)
    if walk.left == 0 or graph.is_constant(value):
        return NoProduct(operation)
    if operation.kind == "matmul":
        return _at_product(graph, operation, walk)
    if operation.kind == "move":
        return _through_movement(graph, operation, walk)
    if operation.kind == "map":
        return _through_map(graph, operation, walk)
    if mixes_channels(graph, operation):
        inner = _walk_back(graph, operation.inputs[0], walk.deeper())
        if isinstance(inner, ScorePath) and inner.certainty == 2:
            return replace(inner, path=(*inner.path, value), talking_heads=True)
    return NoProduct(operation)


def mixes_channels(graph: GraphView, operation: Operation) -> bool:
    """A learned map that keeps the shape: what mixing the scores or probabilities of heads looks like."""
    if operation.kind == "linear" or (operation.kind == "conv" and operation.attributes["pointwise"]):
        return graph.shape(operation.value) == graph.shape(operation.inputs[0])
    return False


def _at_product(graph: GraphView, operation: Operation, walk: _Walk) -> ScorePath | NoProduct:
    projected = cast(GraphView, ComputedConstants(graph))  # learned queries, once projected, are queries like any
    if not any(projected.is_constant(operand) for operand in operation.inputs):
        return ScorePath(operation.value, certainty=2)
    live = [operand for operand in operation.inputs if not graph.is_constant(operand)]
    if not live:
        return NoProduct(operation)
    (operand,) = live
    if graph.shape(operand) == graph.shape(operation.value):  # a constant matrix may mix the heads of real scores
        inner = _walk_back(graph, operand, walk.deeper())
        if isinstance(inner, ScorePath) and inner.certainty == 2:
            return replace(inner, path=(*inner.path, operation.value), talking_heads=True)
    return ScorePath(operation.value, certainty=1)


def _best(graph: GraphView, operands: tuple[str, ...], walk: _Walk) -> tuple[str, ScorePath] | NoProduct:
    """The operand that leads to the most certain product."""
    best: tuple[str, ScorePath] | None = None
    stopped: NoProduct | None = None
    for operand in dict.fromkeys(operands):
        result = _walk_back(graph, operand, walk.deeper())
        if isinstance(result, NoProduct):
            stopped = stopped or (None if graph.is_constant(operand) else result)
        elif best is None or result.certainty > best[1].certainty:
            best = operand, result
    return best or stopped or NoProduct(graph.operation(operands[0]))


def _through_movement(graph: GraphView, operation: Operation, walk: _Walk) -> ScorePath | NoProduct:
    written_over = operation.name in ("slice_scatter", "select_scatter")
    found = _best(graph, operation.inputs[::-1] if written_over else operation.inputs, walk)
    if isinstance(found, NoProduct):
        return found
    operand, inner = found
    others = [other for other in operation.inputs if other != operand]
    inner = replace(inner, path=(*inner.path, operation.value))
    if others:
        inner = inner.refused(Refusal("joined-scores", f"scores are joined with others by {operation.name}"))
    if operation.attributes.get("directed_by"):
        why = f"scores are picked by {operation.name} at positions that depend on the data"
        inner = inner.refused(Refusal("picked-scores", why))
    return inner


def _through_map(graph: GraphView, operation: Operation, walk: _Walk) -> ScorePath | NoProduct:
    factor = constant_factor(graph, operation)
    if factor is not None:
        inner = _walk_back(graph, factor.operand, walk.deeper())
        return (
            replace(inner.scaled(factor.factor), path=(*inner.path, operation.value))
            if isinstance(inner, ScorePath)
            else inner
        )
    mask = masking(graph, operation)
    found = _best(graph, (mask.scores,) if mask else operation.inputs, walk)
    if isinstance(found, NoProduct):
        return found
    operand, inner = found
    inner = replace(inner, path=(*inner.path, operation.value))
    if mask is not None:
        return inner.joined(Joined(operation.value, mask.condition, 1.0, mask.dropped, mask.filling - inner.shift))
    others = [other for other in operation.inputs if other != operand]
    alpha = float(operation.attributes.get("alpha", 1.0))  # type: ignore[arg-type]
    right = -alpha if operation.name == "sub" else alpha  # left + right * second operand
    if operation.name in ("add", "sub") and "scalar" in operation.attributes:
        number = float(operation.attributes["scalar"])  # type: ignore[arg-type]
        if operation.attributes["position"] == 1:
            return replace(inner, shift=inner.shift + right * number)
        inner = inner.scaled(right)
        return replace(inner, shift=inner.shift + number)
    if operation.name in ("add", "sub") and len(operation.inputs) == 2 and len(others) == 1:
        if operation.inputs[0] == operand:
            return inner.joined(Joined(operation.value, others[0], right))
        return inner.scaled(right).joined(Joined(operation.value, others[0]))
    if operation.name == "mul" and len(others) == 1 and not inner.terms and inner.temperature is None:
        shift = math.nan if inner.shift else 0.0  # times what? no filling is known to be lower by that much
        return replace(inner, temperature=Joined(operation.value, others[0]), shift=shift)
    return inner.refused(Refusal("changed-scores", f"scores pass through {operation.name}"))


@dataclass(frozen=True)
class ValuePath:
    """From a softmax to the product with the values: `path` in forward order, product excluded; its other operand.

    `others` are the other ways there, where parts of the probabilities meet before they do the values.
    """

    product: str
    probabilities: str
    values: str
    path: tuple[str, ...]
    talking_heads: bool
    obstacles: tuple[Refusal, ...]
    others: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Probabilities:
    """What becomes of the probabilities: the products that read them, and whether anything else does; `weigh_weights`:
    whether they weigh what is made of weights alone.
    """

    products: tuple[ValuePath, ...]
    escape: bool
    weigh_weights: bool = False


def walk_forward(graph: GraphView, softmax: str) -> Probabilities:
    """Every product that reads the probabilities, through movement, elementwise maps and the mixing of heads."""
    products: list[ValuePath] = []
    joins: dict[str, list[tuple[str, ...]]] = {}
    escape = weigh_weights = False
    pending: list[tuple[str, tuple[str, ...], bool, tuple[Refusal, ...]]] = [(softmax, (), False, ())]
    seen, divided = {softmax}, "divided" in graph.operation(softmax).attributes
    while pending:
        value, path, talking, obstacles = pending.pop()
        for user in graph.users(value):
            operation = graph.operation(user)
            if value == softmax and divided and operation.kind == "reduce":  # their sum, which divides the product
                continue
            step = (*path, user)
            others = [operand for operand in operation.inputs if operand != value]
            if operation.kind == "matmul" and others and not graph.is_constant(others[0]):
                products.append(ValuePath(user, value, others[0], path, talking, obstacles))
            elif operation.kind != "matmul" and user in seen:
                joins.setdefault(user, []).append(step)
            elif user in seen or (passed := _passage(graph, operation, value, softmax)) is None:
                escape = True
                weigh_weights |= operation.kind in ("matmul", "linear")
            else:
                seen.add(user)
                pending.append((user, step, talking or passed.mixes_heads, (*obstacles, *passed.obstacles)))
    found = tuple(replace(product, others=_others(product.path, joins)) for product in products)
    return Probabilities(found, escape, weigh_weights)


@dataclass(frozen=True)
class _Passage:
    """What an operation on the way of the probabilities does to them: `obstacles` say why no form can stand for it."""

    mixes_heads: bool = False
    obstacles: tuple[Refusal, ...] = ()


def _passage(graph: GraphView, operation: Operation, value: str, softmax: str) -> _Passage | None:
    """How probabilities at `value` pass through an operation; None where what it makes are no probabilities."""
    if operation.name == "output":  # which is no tensor, and has no shape
        return None
    keeps_shape = graph.shape(operation.value) == graph.shape(value)
    if operation.kind == "matmul":  # with a constant
        return _Passage(mixes_heads=True) if keeps_shape and operation.inputs != (value, value) else None
    if operation.kind == "move" and operation.inputs == (value,):
        if not operation.attributes.get("directed_by"):
            return _Passage()
        why = f"probabilities are picked by {operation.name} at positions that depend on the data"
        return _Passage(obstacles=(Refusal("picked-probabilities", why),))
    if operation.kind == "map" and math.prod(graph.shape(operation.value)) == math.prod(graph.shape(value)):
        factor = constant_factor(graph, operation)
        if (factor is not None and factor.factor == 1.0) or _clears_masked(graph, operation, softmax):
            return _Passage()
        why = f"probabilities pass through {operation.name}"
        return _Passage(obstacles=(Refusal("changed-probabilities", why),))
    if operation.kind == "norm" and keeps_shape:
        return _Passage(True, (Refusal("normalised-probabilities", "probabilities pass through a normalisation"),))
    return _Passage(mixes_heads=True) if mixes_channels(graph, operation) else None


def _others(path: tuple[str, ...], joins: dict[str, list[tuple[str, ...]]]) -> tuple[tuple[str, ...], ...]:
    """The other ways that lead to the end of a path, by where they join it."""
    return tuple((*way, *path[place + 1 :]) for place, value in enumerate(path) for way in joins.get(value, ()))


def _clears_masked(graph: GraphView, operation: Operation, softmax: str) -> bool:
    """Whether a map writes zeros over rows in which nothing may be attended to, as torch's safe softmax does."""
    mask = next(
        (each for each in written_over(graph, operation) if (each.scores, each.filling) == (softmax, 0.0)), None
    )
    if mask is None:
        return False
    asked, steps = graph.operation(mask.condition), [] if mask.dropped else ["not"]
    while asked.name in _LOGIC and len(asked.inputs) == 1:
        if asked.kind == "reduce" and asked.attributes["axes"] != (graph.operation(softmax).attributes["axis"],):
            return False
        steps.append(_LOGIC[asked.name])
        asked = graph.operation(asked.inputs[0])
    about = {"eq": graph.operation(softmax).inputs[:1], "isnan": (softmax,)}.get(asked.name)
    meant = " ".join(steps).replace("not not", "").strip() in _WHOLE_ROWS.get(asked.name, ())
    return meant and asked.inputs == about and asked.attributes.get("scalar", -np.inf) == -np.inf


_LOGIC = {"logical_not": "not", "bitwise_not": "not", "any": "any", "all": "all"}
# which rows: those of scores -inf alone; those that are not a number, as all of a row is where any is
_WHOLE_ROWS = {"eq": ("", "all", "not any not"), "isnan": ("", "any", "all", "not any not", "not all not")}


def varying_axis(graph: GraphView, product: str, path: tuple[str, ...], axis: int) -> str:
    """Which axis of `product` runs along `axis` at the end of `path`: "row", "column", "lead" or "mixed"."""
    index = push(graph, product, path)
    if not index.size:
        return "mixed"
    shape = graph.shape(product)
    lines = np.moveaxis(index, axis, -1).reshape(-1, index.shape[axis])
    whole = (lines >= 0).all(axis=1)
    if not whole.any():
        return "mixed"
    line = lines[whole.argmax()]
    if len(line) == 1:  # nothing varies along an axis of one element: it is the product's axis of length one
        single = [name for name, size in (("column", shape[-1]), ("row", shape[-2])) if size == 1]
        return single[0] if single else "lead"
    columns, rows = line % shape[-1], line // shape[-1] % shape[-2]
    leads = line // (shape[-1] * shape[-2])
    moving = [name for name, part in (("column", columns), ("row", rows), ("lead", leads)) if len(np.unique(part)) > 1]
    return moving[0] if len(moving) == 1 else "mixed"
