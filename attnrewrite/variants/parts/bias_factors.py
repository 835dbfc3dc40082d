"""What a bias of positions does, where a form cannot add it to scores: a fixed mixing of the values, of low rank."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from attnrewrite.variants.parts.form import Form, Heads, Supplemented
from attnrewrite.variants.parts.ridge import LeastSquares
from attnrewrite.variants.parts.softmax_rows import with_outputs

MOST_PAIRS = 2**21  # of a query and a key: of more, what the bias does is neither averaged nor factored
RIDGE = 1e-15  # lest a head whose bias changes nothing divides by zero


class BiasFactors(Supplemented):
    """form(q, k, v) + U V v, with U [H, N, rank] (`to_queries`) and V [H, rank, M] (`of_keys`), which start as zeros.

    U V is what is nearest to what a bias b [B, H, N, M] makes of softmax's weights and not of the form's where scores
    are zero, on average over images and windows: to softmax(b) - 1/M where the form has no place for b. Each head's are
    multiplied so that they come nearest to what `form` lacks of softmax's output, in rows behind the first `prefix`.
    """

    def __init__(
        self, form: Form, heads: int, queries: int, keys: int, rank: int, scale: float, prefix: int = 0
    ) -> None:
        super().__init__(form)
        self.scale = scale
        self.prefix = prefix
        self.to_queries = nn.Parameter(torch.zeros(heads, queries, rank))
        self.of_keys = nn.Parameter(torch.zeros(heads, rank, keys))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.form(query, key, value, bias) + self.mixed(value)

    def mixed(self, value: Tensor) -> Tensor:
        """U V v [B, H, N, e]."""
        return self.to_queries @ (self.of_keys @ value)

    @torch.no_grad()
    def refine(self, activations: Callable[[], Iterator[Heads]]) -> None:
        self.form.refine(activations)
        heads, keys, rows = len(self.of_keys), self.of_keys.shape[2], 0
        total = self.to_queries.new_zeros(heads, self.to_queries.shape[1], keys, dtype=torch.float64)
        for batch in activations():
            for bias in () if batch.bias is None else batch.bias:  # one at a time: there are N M of them
                bias = bias.expand_as(total).double()
                weights = bias.softmax(2) - self.form.at_rest(bias.unsqueeze(0))[0]
                total += weights.nan_to_num(0)  # a row that is masked whole has no weights
                rows += 1
        if rows:
            self._factor(total / rows)
            self.to_queries.mul_(self._missing(activations()))

    def _factor(self, weights: Tensor) -> None:
        """Be the nearest to `weights` [H, N, M] that the rank allows (Eckart and Young)."""
        left, size, right = torch.linalg.svd(weights, full_matrices=False)
        rank = self.of_keys.shape[1]
        root = size[:, :rank].sqrt()
        self.to_queries.copy_(left[:, :, :rank] * root.unsqueeze(1))
        self.of_keys.copy_(right[:, :rank] * root.unsqueeze(2))

    def _missing(self, batches: Iterator[Heads]) -> Tensor:
        """How many times what the factors mix is missing in the form's output, [H, 1, 1]."""
        fit = LeastSquares()
        for heads, target in with_outputs(batches, self.scale):
            parts = target - self.form(*heads), self.mixed(heads.value)
            lacks, mixed = (part[:, :, self.prefix :].transpose(0, 1).flatten(1).unsqueeze(2) for part in parts)
            fit.add(mixed.double(), lacks.double())
        return fit.solve(RIDGE)

    def deploy(self) -> Form:
        """Without the factors where they are zeros, as they are uncalibrated."""
        super().deploy()
        return self if bool(self.of_keys.any()) else self.form
