"""What a conversion loses on images it was not fitted to, and what it may be promised to lose at most.

Counting right answers needs tens of thousands of images to tell half a point from nothing. With labels, the loss is
therefore taken from the original's own probabilities, which the labels temper: an image whose class does not change
loses nothing, and one whose class changes from a to b loses p(a) - p(b), the chance that a was right less the chance
that b is. Its spread is a tenth of the count's. The count still has a say: it must not contradict.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnrewrite.calibration.stage import divergence

CONFIDENCE = 0.95  # of the upper bounds, one-sided
TEMPERATURES = (0.2, 10.0)
TOP1 = "top-1 points, from the original's probabilities tempered by the labels"
AGREEMENT = "points of agreement with the original (the images have no labels)"


@dataclass(frozen=True)
class Loss:
    """On `images` images: `points` lost in the `measure`, and the most that it may be with CONFIDENCE, `bound`.

    `counted` is the plain difference of top-1 (None without labels), `agreement` in percent, `kl` in nats an image.
    """

    measure: str
    points: float
    bound: float
    counted: float | None
    agreement: float
    kl: float
    images: int


@dataclass(frozen=True)
class LossMeter:
    """The original's logits [n, classes] and, where known, the labels [n]: what conversions are held against."""

    original: Tensor
    labels: np.ndarray | None
    temperature: float = 1.0

    @staticmethod
    def of(original: Tensor, labels: np.ndarray | None) -> "LossMeter":
        """A meter whose probabilities are tempered to the labels' likelihood."""
        return LossMeter(original, labels, 1.0 if labels is None else _temperature(original, labels))

    def of_images(self, chosen: np.ndarray) -> "LossMeter":
        """The same for some of the images: their numbers, or which of all they are."""
        labels = None if self.labels is None else self.labels[chosen]
        return LossMeter(self.original[torch.from_numpy(chosen)], labels, self.temperature)

    @property
    def measure(self) -> str:
        return AGREEMENT if self.labels is None else TOP1

    def loss(self, given: Tensor) -> Loss:
        """What the logits `given` [n, classes] lose; where they are NaN, as much as the unlikeliest class would."""
        before = self.original.argmax(1)
        after = torch.where(given.isnan().any(1), self.original.argmin(1), given.argmax(1))
        changed = (before != after).numpy()
        kl = distance(self.original, given)
        agreement = 100 * (1 - float(changed.mean()))
        if self.labels is None:
            return Loss(
                AGREEMENT, 100 - agreement, 100 * most_of(int(changed.sum()), len(changed)), None, agreement, kl,
                len(changed),
            )  # fmt: skip
        lost, flip = self._chances(before, after)
        right = [(c.numpy() == self.labels).astype(float) for c in (before, after)]
        counted = right[0] - right[1]
        bound = max(most_on_average(lost, flip), _least_on_average(counted))
        return Loss(
            TOP1, 100 * float(lost.mean()), 100 * bound, 100 * float(counted.mean()), agreement, kl, len(changed)
        )

    @property
    def least_bound(self) -> float:
        """The bound, in points, of a conversion that changes nothing: no promise under it can be made."""
        return self.loss(self.original).bound

    def _chances(self, before: Tensor, after: Tensor) -> tuple[np.ndarray, float]:
        """p(a) - p(b) for each image, and what an average image would lose to its second class."""
        chances = (self.original / self.temperature).softmax(1)
        lost = chances.gather(1, before[:, None]) - chances.gather(1, after[:, None])
        first, second = chances.topk(2, dim=1).values.unbind(1)
        return lost[:, 0].numpy(), float((first - second).mean())


def distance(wanted: Tensor, found: Tensor) -> float:
    """The divergence of logits, infinite where it is NaN: that compares as neither near nor far."""
    kl = divergence(wanted, found)
    return math.inf if math.isnan(kl) else kl


def most_of(hits: int, count: int) -> float:
    """The upper bound of a share of which `hits` of `count` were seen (Clopper and Pearson 1934)."""
    from scipy.stats import beta

    return 1.0 if hits >= count else float(beta.ppf(CONFIDENCE, hits + 1, count - hits))


def most_on_average(values: np.ndarray, one_more: float) -> float:
    """The upper bound of a mean of mostly zeros, as if one value more than was seen, `one_more`, were among them:
    nothing seen in n is no proof that there is nothing.
    """
    count = len(values)
    mean = (values.sum() + one_more) / count
    square = (np.square(values).sum() + one_more**2) / count
    return float(mean + _deviations() * np.sqrt(max(0.0, square - mean**2) / count))


def _least_on_average(values: np.ndarray) -> float:
    """The lower bound of a mean."""
    return float(values.mean() - _deviations() * values.std() / np.sqrt(len(values)))


def _deviations() -> float:
    from scipy.stats import norm

    return float(norm.ppf(CONFIDENCE))


def _temperature(logits: Tensor, labels: np.ndarray) -> float:
    """What to divide the logits [n, classes] by for the labels [n] to be the likeliest (Guo et al. 2017)."""
    from scipy.optimize import minimize_scalar

    wanted = torch.from_numpy(labels)

    def unlikelihood(log_temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits / np.exp(log_temperature), wanted))

    low, high = np.log(TEMPERATURES)
    return float(np.exp(minimize_scalar(unlikelihood, bounds=(low, high), method="bounded").x))
