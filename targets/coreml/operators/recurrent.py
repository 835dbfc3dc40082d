"""Core ML's recurrent operator, the LSTM, step by step. Called as those of arithmetic are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def lstm(
    x: Tensor,
    initial_h: Tensor,
    initial_c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    direction: str,
    output_sequence: Tensor,
    recurrent_activation: str,
    cell_activation: str,
    activation: str,
    bias: Tensor | None = None,
    weight_ih_back: Tensor | None = None,
    weight_hh_back: Tensor | None = None,
    bias_back: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`x` is [steps, batch, channels]; the rows of the weights are the gates: input, forget, output, cell."""
    gate, cell, last = (_ACTIVATIONS[name] for name in (recurrent_activation, cell_activation, activation))

    def run(
        steps: Tensor, h: Tensor, c: Tensor, given: Tensor, kept: Tensor, added: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        outputs = []
        for step in torch.nn.functional.linear(steps, given, added):
            enter, forget, leave, new = (step + h @ kept.T).chunk(4, -1)
            c = gate(forget) * c + gate(enter) * cell(new)
            h = gate(leave) * last(c)
            outputs.append(h)
        return torch.stack(outputs), h, c

    if direction != "bidirectional":
        steps = x.flip(0) if direction == "reverse" else x
        sequence, h, c = run(steps, initial_h, initial_c, weight_ih, weight_hh, bias)
        sequence = sequence.flip(0) if direction == "reverse" else sequence
    else:
        assert weight_ih_back is not None
        assert weight_hh_back is not None
        (h_there, h_back), (c_there, c_back) = initial_h.chunk(2, -1), initial_c.chunk(2, -1)
        there = run(x, h_there, c_there, weight_ih, weight_hh, bias)
        back = run(x.flip(0), h_back, c_back, weight_ih_back, weight_hh_back, bias_back)
        sequence = torch.cat([there[0], back[0].flip(0)], -1)
        h, c = (torch.cat(pair, -1) for pair in zip(there[1:], back[1:], strict=True))
    return (sequence if bool(output_sequence) else h[None]), h, c


OPERATORS: dict[str, Callable[..., Any]] = {"lstm": lstm}
