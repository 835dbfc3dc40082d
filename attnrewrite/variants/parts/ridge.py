"""Streaming ridge regression in float64: what every closed-form fit is made of."""

import torch
from torch import Tensor


class LeastSquares:
    """Accumulates columns x [..., samples, f] and targets y [..., samples, t]; solves for w [..., f, t] in y ~ x w.

    Only the statistics are kept, so memory does not grow with the number of samples.
    """

    def __init__(self) -> None:
        self.gram: Tensor | None = None
        self.moment: Tensor | None = None
        self.energy = 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        x, y = x.double(), y.double()
        self.add_statistics(x.transpose(-2, -1) @ x, x.transpose(-2, -1) @ y, float(y.square().sum()))

    def add_statistics(self, gram: Tensor, moment: Tensor, energy: float = 0.0) -> None:
        """Add x^T x, x^T y and the sum of y^2, computed elsewhere."""
        self.gram = gram if self.gram is None else self.gram + gram
        self.moment = moment if self.moment is None else self.moment + moment
        self.energy += energy

    def error(self, weights: Tensor) -> float:
        """The sum of (y - x w)^2 over everything added."""
        if self.gram is None or self.moment is None:
            raise ValueError("nothing was added to the fit")
        return self.energy + float((weights * (self.gram @ weights - 2 * self.moment)).sum())

    def solve(self, ridge: float) -> Tensor:
        """The weights, each column penalised by `ridge` times its own energy (Jacobi scaling)."""
        if self.gram is None or self.moment is None:
            raise ValueError("nothing was added to the fit")
        energy = self.gram.diagonal(dim1=-2, dim2=-1)
        size = energy.clamp(min=torch.finfo(torch.float32).tiny).rsqrt()
        scaled = self.gram * size.unsqueeze(-1) * size.unsqueeze(-2)
        scaled = scaled + ridge * torch.eye(scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
        return torch.linalg.solve(scaled, self.moment * size.unsqueeze(-1)) * size.unsqueeze(-1)
