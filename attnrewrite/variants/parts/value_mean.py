"""How much of the values' mean, and how much of what differs from it: a gain and a shift beside a form.

Softmax may weigh one key many times as much as another. A form whose weights differ less has too little beside the
mean that all tokens share, and no linear map around it changes the proportion: it scales both alike.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from attnrewrite.variants.parts.form import Form, Heads, Supplemented
from attnrewrite.variants.parts.key_masks import key_weights, token_mean
from attnrewrite.variants.parts.ridge import LeastSquares
from attnrewrite.variants.parts.softmax_rows import with_outputs

RIDGE = 1e-4


class ValueMean(Supplemented):
    """gain * form(q, k, v) + shift * mean(v), per channel of every head, from `gain` and `shift` on.

    It is fitted to the rows behind the first `prefix`.
    """

    def __init__(
        self, form: Form, heads: int, channels: int, scale: float, prefix: int, gain: float = 1.0, shift: float = 0.0
    ) -> None:
        super().__init__(form)
        self.scale = scale
        self.prefix = prefix
        self.gain = nn.Parameter(torch.full((heads, 1, channels), gain))
        self.shift = nn.Parameter(torch.full((heads, 1, channels), shift))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.mixed(self.form(query, key, value, bias), value, bias)

    def mixed(self, form: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """The result, of what the form gives [B, H, N, e] and the values."""
        return form * self.gain + token_mean(value, key_weights(bias)) * self.shift

    def columns(self, form: Tensor, value: Tensor, bias: Tensor | None) -> list[Tensor]:
        """What each channel's result is a combination of: [channels, samples] each."""
        return [self.rows(form), self.rows(token_mean(value, key_weights(bias)).expand_as(form))]

    def take(self, change: Tensor) -> None:
        """Add to the coefficients of the columns [channels, columns]."""
        for parameter, column in zip((self.gain, self.shift), change.T, strict=False):
            parameter.add_(column.reshape_as(parameter.mT).mT)

    def rows(self, tokens: Tensor) -> Tensor:
        """[B, H, N, e] as [channels, samples], without the rows of the prefix."""
        return tokens[:, :, self.prefix :].permute(1, 3, 0, 2).flatten(0, 1).flatten(1)

    @torch.no_grad()
    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        """Refine the form, then fit the coefficients to softmax's output by least squares, channel by channel.

        The ridge pulls towards what stands there, in units of each column's own energy.
        """
        self.form.refine(activations)
        fit = LeastSquares()
        for heads, target in with_outputs(activations(), self.scale):
            form = self.form(*heads)
            residual = self.rows(target - self.mixed(form, heads.value, heads.bias))
            columns = torch.stack(self.columns(form, heads.value, heads.bias), dim=-1)
            fit.add(columns.double(), residual.unsqueeze(-1).double())
        self.take(fit.solve(RIDGE)[:, :, 0].to(self.gain))
