"""How much what a model gives differs between images: what the distance between two models' answers is measured in."""

import torch
from torch import Tensor

CONSTANT = 1e-10  # of an output's squares; where so little differs between images, rounding is all that does


class Spread:
    """How far the rows of tensors are from their mean, of any number of tensors whose rows have one shape."""

    def __init__(self) -> None:
        self.rows = self.elements = 0
        self.squares = 0.0
        self.sum: Tensor | float = 0.0

    def add(self, tensor: Tensor) -> None:
        """Count the rows of `tensor` [rows, ...]."""
        self.elements += tensor.numel()
        for row in tensor:
            wide = row.double()
            self.rows += 1
            self.squares += float(wide.square().sum())
            self.sum += wide

    @property
    def energy(self) -> float:
        """The sum of their squared distances from it."""
        return max(0.0, self.squares - float(torch.as_tensor(self.sum).square().sum()) / self.rows)

    @property
    def constant(self) -> bool:
        """Whether they are all alike, or not finite."""
        return not self.energy > CONSTANT * self.squares


def squared_norm(tensor: Tensor) -> float:
    """The sum of its elements' squares, in float64, of which there is one row's at a time."""
    return sum(float(row.double().square().sum()) for row in torch.atleast_1d(tensor))
