"""The numbers behind a traced projection, in (head, channel) order, and the fingerprint that names them."""

import hashlib

import numpy as np

from attnrewrite.patterns.graph import GraphView
from attnrewrite.site import Normalization, OutputProjection, Projection, Untraced


def projection_weights(graph: GraphView, projection: Projection) -> tuple[np.ndarray, np.ndarray | None]:
    """(weight [heads * head_dim, in], bias [heads * head_dim] or None), BatchNorm folded in, `factor` left out."""
    weight, bias = _matrix(graph, projection.weight, projection.bias, projection.transposed)
    if projection.normalization is not None:
        weight, bias = _fold_norm(graph, projection.normalization, weight, bias)
    rows = np.asarray(projection.rows)
    return weight[rows], None if bias is None else bias[rows]


def output_weights(graph: GraphView, projection: OutputProjection) -> tuple[np.ndarray, np.ndarray | None]:
    """(weight [out, heads * value_dim], bias [out] or None)."""
    weight, bias = _matrix(graph, projection.weight, projection.bias, projection.transposed)
    return weight[:, np.asarray(projection.columns)], bias


def fingerprint(graph: GraphView, projections: tuple[Projection | OutputProjection | Untraced, ...]) -> str | None:
    """A hash of the traced weights in canonical order, the same in every frontend; None when none is traced."""
    digest = hashlib.blake2b(digest_size=16)
    traced = False
    for role, projection in zip("qkvo", projections, strict=True):
        if isinstance(projection, Untraced):
            continue
        traced = True
        weight, _ = output_weights(graph, projection) if isinstance(projection, OutputProjection) else projection_weights(graph, projection)
        digest.update(role.encode() + repr(weight.shape).encode())
        digest.update(np.ascontiguousarray(weight, dtype=np.float32).tobytes())
    return digest.hexdigest() if traced else None


def _matrix(graph: GraphView, weight: str, bias: str | None, transposed: bool) -> tuple[np.ndarray, np.ndarray | None]:
    matrix = graph.constant(weight)
    matrix = matrix.T if transposed else matrix.reshape(matrix.shape[0], -1)
    return matrix, None if bias is None else np.broadcast_to(graph.constant(bias).reshape(-1), matrix.shape[:1])


def _fold_norm(graph: GraphView, norm: Normalization, weight: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    mean, variance = graph.constant(norm.mean).astype(np.float64), graph.constant(norm.variance).astype(np.float64)
    gain = 1.0 / np.sqrt(variance + float(np.float32(norm.epsilon)))  # ONNX stores epsilon as float32
    if norm.weight is not None:
        gain = gain * graph.constant(norm.weight)
    shift = -mean * gain + (0.0 if norm.bias is None else graph.constant(norm.bias))
    folded = (weight * gain[:, None]).astype(weight.dtype)
    return folded, (shift + (0.0 if bias is None else bias * gain)).astype(weight.dtype)
