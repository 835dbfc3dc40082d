"""Streaming ridge regression, summed and solved in float64: what every closed-form fit is made of."""

import torch
from torch import Tensor

HALVED_FROM = 512  # columns: smaller products are faster whole


class LeastSquares:
    """Accumulates columns x [..., samples, f] and targets y [..., samples, t]; solves for w [..., f, t] in y ~ x w.

    Only the statistics are kept, so memory does not grow with the number of samples. The products of what is added at
    once are in its own type: in float32 they are off by parts in a million of the columns' energies, a ridge is a part
    in a thousand.
    """

    def __init__(self) -> None:
        self.gram: Tensor | None = None
        self.moment: Tensor | None = None
        self.energy: Tensor | None = None

    def add(self, x: Tensor, y: Tensor, last: Tensor | None = None) -> None:
        """Add samples; `last` [..., samples] is one more column behind those of x, which need not be copied for it."""
        own, moment = gram(x), x.transpose(-2, -1) @ y
        if last is not None:
            column = last.unsqueeze(-1)
            beside, corner = x.transpose(-2, -1) @ column, column.transpose(-2, -1) @ column
            own = torch.cat([torch.cat([own, beside], -1), torch.cat([beside.transpose(-2, -1), corner], -1)], -2)
            moment = torch.cat([moment, column.transpose(-2, -1) @ y], -2)
        self._add(own.double(), moment.double(), y.square().sum(-2).double())

    def add_statistics(self, gram: Tensor, moment: Tensor, energy: Tensor | None = None) -> None:
        """Add x^T x, x^T y and, for each target, the sum of y^2 [..., t], computed elsewhere."""
        none = torch.zeros_like(moment[..., 0, :])
        self._add(gram.clone(), moment.clone(), none if energy is None else none + energy)

    def _add(self, gram: Tensor, moment: Tensor, energy: Tensor) -> None:
        self.gram = gram if self.gram is None else self.gram.add_(gram)
        self.moment = moment if self.moment is None else self.moment.add_(moment)
        self.energy = energy if self.energy is None else self.energy.add_(energy)

    def errors(self, weights: Tensor) -> Tensor:
        """For each target, the sum of (y - x w)^2 over everything added: [..., t]."""
        if self.gram is None or self.moment is None or self.energy is None:
            raise ValueError("nothing was added to the fit")
        return self.energy + (weights * (self.gram @ weights - 2 * self.moment)).sum(-2)

    def solve(self, ridge: float) -> Tensor:
        """The weights, each column penalised by `ridge` times its own energy (Jacobi scaling)."""
        if self.gram is None or self.moment is None:
            raise ValueError("nothing was added to the fit")
        energy = self.gram.diagonal(dim1=-2, dim2=-1)
        size = energy.clamp(min=torch.finfo(torch.float32).tiny).rsqrt()
        scaled = (self.gram * size.unsqueeze(-1)).mul_(size.unsqueeze(-2))
        scaled.diagonal(dim1=-2, dim2=-1).add_(ridge)
        wanted = self.moment * size.unsqueeze(-1)
        factor, failed = torch.linalg.cholesky_ex(scaled)
        found = torch.linalg.solve(scaled, wanted) if bool(failed.any()) else torch.cholesky_solve(wanted, factor)
        return found * size.unsqueeze(-1)


def gram(x: Tensor) -> Tensor:
    """x^T x [..., f, f] of x [..., samples, f]; what lies below the diagonal is copied, not computed again."""
    width = x.shape[-1]
    if width < HALVED_FROM:
        return x.transpose(-2, -1) @ x
    left, right = x[..., : width // 2], x[..., width // 2 :]
    beside = left.transpose(-2, -1) @ right
    upper = torch.cat([gram(left), beside], dim=-1)
    return torch.cat([upper, torch.cat([beside.transpose(-2, -1), gram(right)], dim=-1)], dim=-2)
