"""A local branch beside any linear form: what a global average cannot say, at nine multiplies a channel."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.site import Grid
from attnrewrite.variants.parts.form import FoldableMaps, Form, Heads
from attnrewrite.variants.parts.ridge import LeastSquares
from attnrewrite.variants.parts.softmax_rows import with_outputs

RIDGE = 1e-4


class LocalBranch(Form):
    """gain * form(q, k, v) + shift * mean(v) + depthwise 3x3 of v over the image grid, per channel of every head.

    It starts as the form alone (gain 1, the rest 0). Prefix tokens take no part in the convolution.
    """

    def __init__(self, form: Form, grid: Grid, heads: int, channels: int, scale: float) -> None:
        super().__init__()
        self.form = form
        self.grid = grid
        self.scale = scale
        self.gain = nn.Parameter(torch.ones(heads, 1, channels))
        self.shift = nn.Parameter(torch.zeros(heads, 1, channels))
        self.kernel = nn.Parameter(torch.zeros(heads * channels, 1, 3, 3))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        image = self._image(value)
        near = F.conv2d(image, self.kernel, padding=1, groups=image.shape[1])
        near = near.reshape(-1, value.shape[1], value.shape[3], image.shape[2] * image.shape[3]).permute(0, 1, 3, 2)
        near = F.pad(near, (0, 0, self.grid.prefix, 0))
        return self.form(query, key, value, bias) * self.gain + value.mean(2, keepdim=True) * self.shift + near

    def _image(self, value: Tensor) -> Tensor:
        """The grid tokens of value [B, H, N, e] as an image [B, H * e, rows, columns]."""
        tokens = value[..., self.grid.prefix :, :].permute(0, 1, 3, 2)
        return tokens.reshape(-1, value.shape[1] * value.shape[3], self.grid.rows, self.grid.columns)

    @torch.no_grad()
    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        """Refine the form, then fit the branch to the softmax output of the grid tokens by least squares per channel.

        The ridge pulls towards the form alone, in units of each column's own energy.
        """
        self.form.refine(activations)
        fit = LeastSquares()
        for heads, target in with_outputs(activations(), self.scale):
            form = self.form(*heads)
            residual = self._image(target - form).permute(1, 0, 2, 3).reshape(self.kernel.shape[0], -1, 1)
            fit.add(self._columns(form, heads.value).double(), residual.double())
        change = fit.solve(RIDGE)[:, :, 0].to(self.kernel)
        self.gain.copy_(1 + change[:, 0].reshape_as(self.gain.transpose(1, 2)).transpose(1, 2))
        self.shift.copy_(change[:, 1].reshape_as(self.shift.transpose(1, 2)).transpose(1, 2))
        self.kernel.copy_(change[:, 2:].reshape_as(self.kernel))

    def _columns(self, form: Tensor, value: Tensor) -> Tensor:
        """What each channel's output is a combination of: [channels, samples, 11]."""
        image = self._image(value)
        padded = F.pad(image, (1, 1, 1, 1))
        rows, columns = image.shape[2:]
        shifted = [padded[:, :, i : i + rows, j : j + columns] for i in range(3) for j in range(3)]
        mean = value.mean(2).reshape(-1, image.shape[1], 1, 1).expand_as(image)
        stacked = torch.stack([self._image(form), mean, *shifted], dim=-1)
        return stacked.permute(1, 0, 2, 3, 4).reshape(image.shape[1], -1, 11)

    def token_maps(self, heads: Heads) -> dict[str, Tensor]:
        return self.form.token_maps(heads)

    def resolved(self) -> dict[str, Any]:
        return self.form.resolved()

    def foldable_maps(self) -> FoldableMaps | None:
        """The form's own, of query and key: value and result are the branch's too."""
        inner = self.form.foldable_maps()
        if inner is None or inner.value is not None or inner.output is not None:
            return None
        form = copy.deepcopy(self)
        form.form = inner.form
        return replace(inner, form=form)

    def deploy(self) -> Form:
        self.form = self.form.deploy()
        return self
