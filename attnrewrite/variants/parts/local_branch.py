"""A local branch beside any linear form: what a global average cannot say, at nine multiplies a channel."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.site import Grid
from attnrewrite.variants.parts.form import Form
from attnrewrite.variants.parts.value_mean import ValueMean


class LocalBranch(ValueMean):
    """gain * form(q, k, v) + shift * mean(v) + depthwise 3x3 of v over the image grid, per channel of every head.

    The convolution starts as zeros. Prefix tokens take no part in it.
    """

    def __init__(
        self, form: Form, grid: Grid, heads: int, channels: int, scale: float, gain: float = 1.0, shift: float = 0.0
    ) -> None:
        super().__init__(form, heads, channels, scale, grid.prefix, gain, shift)
        self.grid = grid
        self.kernel = nn.Parameter(torch.zeros(heads * channels, 1, 3, 3))

    def mixed(self, form: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        image = self._image(value)
        near = F.conv2d(image, self.kernel, padding=1, groups=image.shape[1])
        near = near.reshape(-1, value.shape[1], value.shape[3], image.shape[2] * image.shape[3]).permute(0, 1, 3, 2)
        return super().mixed(form, value, bias) + F.pad(near, (0, 0, self.grid.prefix, 0))

    def columns(self, form: Tensor, value: Tensor, bias: Tensor | None) -> list[Tensor]:
        image = self._image(value)
        padded = F.pad(image, (1, 1, 1, 1))
        rows, columns = image.shape[2:]
        shifted = [padded[:, :, i : i + rows, j : j + columns] for i in range(3) for j in range(3)]
        return [*super().columns(form, value, bias), *(each.transpose(0, 1).flatten(1) for each in shifted)]

    def take(self, change: Tensor) -> None:
        super().take(change)
        self.kernel.add_(change[:, 2:].reshape_as(self.kernel))

    def _image(self, value: Tensor) -> Tensor:
        """The grid tokens of value [B, H, N, e] as an image [B, H * e, rows, columns]."""
        tokens = value[..., self.grid.prefix :, :].permute(0, 1, 3, 2)
        return tokens.reshape(-1, value.shape[1] * value.shape[3], self.grid.rows, self.grid.columns)
