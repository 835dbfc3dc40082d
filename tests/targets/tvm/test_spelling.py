"""Products around a softmax are one kernel, from whichever side the value is multiplied."""

import numpy as np
import pytest

pytest.importorskip("tvm")

from kernels import close, scheduled, softmax, values, wide
from tvm import relax

OP = relax.op


@pytest.mark.parametrize("bias", [False, True])
def test_a_value_with_its_channels_first_is_attended_to(bias: bool) -> None:
    query, key, value = values((1, 2, 8, 20), (1, 2, 8, 20), (1, 2, 5, 20))
    (scores,) = values((2, 20, 20))
    added = scores if bias else np.zeros_like(scores)
    rules, run = scheduled(
        [query, key, value],
        lambda q, k, v, b: OP.matmul(
            v,
            OP.permute_dims(OP.nn.softmax(OP.add(OP.matmul(OP.permute_dims(q, [0, 1, 3, 2]), k), b)), [0, 1, 3, 2]),
        ),
        [added],
    )
    assert rules == ["attention"]
    query, key, value, added = wide(query, key, value, added)
    close(run(), value @ softmax(query.swapaxes(2, 3) @ key + added).swapaxes(2, 3))


def test_rows_of_weights_beside_a_value_are_no_attention() -> None:
    scores, value = values((1, 2, 6, 6), (1, 2, 6, 6))
    rules, run = scheduled([scores, value], lambda s, v: OP.matmul(v, OP.nn.softmax(s)))
    assert "attention" not in rules
    close(run(), wide(value)[0] @ softmax(*wide(scores)))


@pytest.mark.parametrize("shapes", [((5,), (5,)), ((2, 5), (5,)), ((5,), (5, 3)), ((2, 3, 5), (5,))])
def test_products_with_a_vector_are_no_attention(shapes: tuple[tuple[int, ...], ...]) -> None:
    left, right = values(*shapes)
    rules, run = scheduled([left, right], lambda a, b: OP.matmul(OP.nn.softmax(a), b))
    assert "attention" not in rules
    left, right = wide(left, right)
    close(run(), softmax(left) @ right)
