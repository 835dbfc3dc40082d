"""Arithmetic goes before movement, where that is the same numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

from kernels import close, relax_module, scheduled, values, wide
from tvm import relax

from attnrewrite.targets.tvm.schedules.moves_last import moves_last

OP = relax.op
TOKENS, OTHER = (1, 12, 8), (1, 8, 12)


def image(x: Any) -> Any:
    """Tokens [1, 12, 8] as an image [1, 8, 3, 4]."""
    return OP.reshape(OP.permute_dims(x, [0, 2, 1]), (1, 8, 3, 4))


def hard_swish(x: Any) -> Any:
    return OP.multiply(x, OP.divide(OP.clip(OP.add(x, relax.const(3.0)), 0, 6), relax.const(6.0)))


# name: (shapes of the inputs, what is made of them, its operators afterwards)
CASES: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any], list[str]]] = {
    "one value": ([TOKENS], lambda x: OP.nn.relu(image(x)), ["nn.relu", "permute_dims", "reshape"]),
    "numbers beside it": (
        [TOKENS],
        lambda x: hard_swish(image(x)),
        ["add", "clip", "divide", "multiply", "permute_dims", "reshape"],
    ),
    "two moved alike": (
        [TOKENS, TOKENS],
        lambda x, y: OP.add(image(x), image(y)),
        ["add", "permute_dims", "reshape"],
    ),
    "two moved otherwise": (
        [TOKENS, OTHER],
        lambda x, y: OP.add(OP.permute_dims(x, [0, 2, 1]), OP.reshape(y, OTHER)),
        ["permute_dims", "reshape", "add"],
    ),
    "two of other shapes": (
        [TOKENS, OTHER],
        lambda x, y: OP.add(OP.reshape(x, (1, 96)), OP.reshape(y, (1, 96))),
        ["reshape", "reshape", "add"],
    ),
    "a value beside it": (
        [TOKENS, (8, 1)],
        lambda x, y: OP.add(OP.permute_dims(x, [0, 2, 1]), y),
        ["permute_dims", "add"],
    ),
    "part of a value": (
        [TOKENS],
        lambda x: OP.nn.relu(OP.strided_slice(x, [1], [0], [5])),
        ["strided_slice", "nn.relu"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_arithmetic_goes_before_movement(name: str) -> None:
    shapes, body, expected = CASES[name]
    main = moves_last(relax_module(shapes, body, []))["main"]
    (block,) = main.body.blocks
    calls = [binding.value for binding in block.bindings if isinstance(binding.value, relax.Call)]
    assert [call.op.name.removeprefix("relax.") for call in calls] == expected


def test_a_product_before_an_image_is_written_as_tokens() -> None:
    import torch

    (x,), (weight, window) = values(TOKENS), values((8, 8), (8, 1, 3, 3))
    rules, run = scheduled(
        [x],
        lambda x, w, k: OP.nn.conv2d(OP.nn.relu(image(OP.matmul(x, w))), k, padding=1, groups=8),
        [weight, window],
    )
    assert rules == ["matmul", "convolution"]
    tokens, matrix, kernel = map(torch.from_numpy, wide(x, weight, window))
    expected = torch.conv2d((tokens @ matrix).mT.reshape(1, 8, 3, 4).relu(), kernel, padding=1, groups=8)
    close(run(), expected.numpy())


def test_the_same_numbers() -> None:
    x, y = values(TOKENS, TOKENS)
    _, run = scheduled([x, y], lambda x, y: hard_swish(OP.add(image(x), image(y))))
    total = np.add(*wide(x, y)).transpose(0, 2, 1).reshape(1, 8, 3, 4)
    close(run(), total * np.clip(total + 3, 0, 6) / 6)
