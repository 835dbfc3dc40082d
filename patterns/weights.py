"""The weights of a traced projection, in (head, channel) order, and the fingerprint that identifies them."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from attnrewrite.patterns.graph import GraphView
from attnrewrite.site import AttentionSite, Normalization, OutputProjection, Projection, Untraced


def projection_weights(graph: GraphView, projection: Projection) -> tuple[np.ndarray, np.ndarray | None]:
    """(weight [heads * head_dim, in], bias [heads * head_dim] or None), BatchNorm folded in, `factor` left out."""
    weight, bias = _matrix(graph, projection.weight, projection.bias, projection.transposed)
    if projection.normalization is not None:
        weight, bias = _with_norm_folded(graph, projection.normalization, weight, bias)
    rows = np.asarray(projection.rows)
    return weight[rows], None if bias is None else bias[rows]


def output_weights(graph: GraphView, projection: OutputProjection) -> tuple[np.ndarray, np.ndarray | None]:
    """(weight [out, heads * value_dim], bias [out] or None)."""
    weight, bias = _matrix(graph, projection.weight, projection.bias, projection.transposed)
    return weight[:, np.asarray(projection.columns)], bias


def fingerprint(graph: GraphView, projections: tuple[Projection | OutputProjection | Untraced, ...]) -> str | None:
    """What identifies the traced weights in canonical order, the same in every frontend; None when none is traced.

    For each role its shape, its norm, and random combinations of its elements over the norm. Numbers, not a hash: an
    exporter that folds a BatchNorm rounds otherwise than we do. Compare with `same_weights`.
    """
    parts = []
    for role, projection in zip("qkvo", projections, strict=True):
        if isinstance(projection, Untraced) or (isinstance(projection, OutputProjection) and not projection.direct):
            continue  # what lies between an output and its map, and behind it, exporters fold in their own ways
        read = output_weights if isinstance(projection, OutputProjection) else projection_weights
        weight, _ = read(graph, projection)  # type: ignore[arg-type]
        parts.append(sketch(weight, role))
    return ";".join(parts) if parts else None


def sketch(weight: np.ndarray, role: str = "w") -> str:
    """What identifies one tensor, as a part of a fingerprint: its role, its shape, its norm and random combinations."""
    numbers = ",".join(f"{number:.5g}" for number in _norm_and_combinations(weight))
    return f"{role}{'x'.join(map(str, weight.shape))}:{numbers}"


_NUMBER = r"-?\d+(\.\d+)?(e[+-]\d+)?"
_PART = rf"[qkvow]\d+(x\d+)*:{_NUMBER}(,{_NUMBER})*"
FINGERPRINT = rf"^{_PART}(;{_PART})*$"  # what `fingerprint` writes
_SAME = 1e-3  # beyond the rounding of half precision, below what any training step leaves of a weight


def same_weights(one: str | None, other: str | None) -> bool:
    """Whether two fingerprints, as FINGERPRINT has them, name the same weights, to a relative 0.1 %."""
    if one is None or other is None:
        return one is other
    ours, theirs = ([part.split(":") for part in name.split(";")] for name in (one, other))
    if [role for role, _ in ours] != [role for role, _ in theirs]:
        return False
    for (_, mine), (_, yours) in zip(ours, theirs, strict=True):
        (norm, *signed), (wanted, *others) = (np.array(numbers.split(","), float) for numbers in (mine, yours))
        if len(signed) != len(others) or abs(norm - wanted) > _SAME * norm:
            return False
        if (np.abs(np.subtract(signed, others)) > _SAME).any():
            return False
    return True


def pick(site_id: str, fingerprint: str | None, sites: Sequence[AttentionSite]) -> AttentionSite | None:
    """The one of `sites` with the same weights: that of the same id if it is among them, else the first."""
    alike = [site for site in sites if same_weights(site.fingerprint, fingerprint)]
    return next((site for site in alike if site.id == site_id), alike[0] if alike else None)


_BUCKETS = 1024


def _norm_and_combinations(weight: np.ndarray, combinations: int = 6) -> list[float]:
    """The norm, and combinations of the elements with random signs over the norm; folded into buckets first."""
    flat = weight.astype(np.float64).reshape(-1)
    norm = float(np.sqrt(np.einsum("i,i->", flat, flat)))  # no BLAS, whose threads meet late on a busy machine
    signs, even = _random_signs(flat.size), flat.size - flat.size % _BUCKETS
    rows, their_signs = (each[:even].reshape(-1, _BUCKETS) for each in (flat, signs))
    folded = np.einsum("rb,rb->b", rows, their_signs)
    folded[: flat.size - even] += flat[even:] * signs[even:]
    mixing = _random_signs(combinations * _BUCKETS, start=1 << 40).reshape(combinations, _BUCKETS)
    return [norm, *((mixing @ folded) / max(norm, 1e-30)).tolist()]


@lru_cache(maxsize=8)  # a model has few sizes of weights
def _random_signs(count: int, start: int = 0) -> np.ndarray:
    """+1 and -1 by the splitmix64 generator (Steele et al., OOPSLA 2014): the same on every machine."""
    state = (np.arange(start, start + count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.where((state ^ (state >> np.uint64(31))) >> np.uint64(63), np.int8(1), np.int8(-1))


def _matrix(graph: GraphView, weight: str, bias: str | None, transposed: bool) -> tuple[np.ndarray, np.ndarray | None]:
    matrix = graph.constant(weight)
    matrix = matrix.T if transposed else matrix.reshape(matrix.shape[0], -1)
    return matrix, None if bias is None else np.broadcast_to(graph.constant(bias).reshape(-1), matrix.shape[:1])


def _with_norm_folded(
    graph: GraphView, norm: Normalization, weight: np.ndarray, bias: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    mean, variance = graph.constant(norm.mean).astype(np.float64), graph.constant(norm.variance).astype(np.float64)
    gain = 1.0 / np.sqrt(variance + float(np.float32(norm.epsilon)))  # ONNX stores epsilon as float32
    if norm.weight is not None:
        gain = gain * graph.constant(norm.weight)
    shift = -mean * gain + (0.0 if norm.bias is None else graph.constant(norm.bias))
    folded = (weight * gain[:, None]).astype(weight.dtype)
    return folded, (shift + (0.0 if bias is None else bias * gain)).astype(weight.dtype)
