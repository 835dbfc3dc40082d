"""Logits are told from embeddings, in every spelling of a head."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.frontends.capture import capture
from attnrewrite.patterns.fx.graph import FxGraph

WIDTH, CLASSES = 8, 5


class Model(nn.Module):
    """[B, 4, 8] tokens through a block with a residual connection, then `head`."""

    def __init__(self, head: Callable[["Model", Tensor], object]) -> None:
        super().__init__()
        self.embed, self.norm, self.mlp = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc, self.other = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)
        self.bare, self.conv = nn.Linear(WIDTH, CLASSES, bias=False), nn.Conv1d(WIDTH, CLASSES, 1)
        self.batch = nn.BatchNorm1d(CLASSES)
        self.register_buffer("texts", F.normalize(torch.randn(CLASSES, WIDTH), dim=1))
        self.shift, self.temperature = nn.Parameter(torch.randn(CLASSES)), nn.Parameter(torch.tensor(2.0))
        self.head = head

    def forward(self, x: Tensor) -> object:
        x = self.embed(x)
        return self.head(self, x + self.mlp(self.norm(x)))


LOGITS: dict[str, Callable[[Model, Tensor], object]] = {
    "a linear map of the first token": lambda m, x: m.fc(m.norm(x)[:, 0]),
    "of the tokens' mean": lambda m, x: m.fc(x.mean(1)),
    "the mean of what it gives": lambda m, x: m.fc(x).mean(1),
    "its bias added apart": lambda m, x: m.bare(x[:, 0]) + m.shift,
    "by a product": lambda m, x: x[:, 0] @ m.bare.weight.t() + m.shift,
    "by addmm": lambda m, x: torch.addmm(m.shift, x[:, 0], m.bare.weight.t()),
    "probabilities without a bias": lambda m, x: m.bare(x[:, 0]).softmax(1),
    "their logarithms": lambda m, x: m.bare(x[:, 0]).log_softmax(1),
    "sigmoid": lambda m, x: m.bare(x[:, 0]).sigmoid(),
    "a convolution and the mean": lambda m, x: m.conv(x.transpose(1, 2)).mean(2),
    "a convolution and pooling": lambda m, x: F.adaptive_avg_pool1d(m.conv(x.transpose(1, 2)), 1).flatten(1),
    "two heads' mean": lambda m, x: (m.fc(x[:, 0]) + m.other(x[:, 1])) / 2,
    "two heads' weighted sum": lambda m, x: torch.stack([m.shift * m.fc(x[:, 0]), 2 * m.other(x[:, 1])]).sum(0),
    "two heads side by side": lambda m, x: torch.cat([m.fc(x[:, 0]), m.other(x[:, 1])], 1),
    "one token's, and the largest of all others'": lambda m, x: m.fc(x[:, 0]) + 0.5 * m.other(x[:, 1:]).max(1)[0],
    "pictures by texts": lambda m, x: F.normalize(x[:, 0], dim=1) @ m.texts.t() * m.temperature.exp(),
    "pictures by each other": lambda m, x: x[:, 0] @ F.normalize(x[:, 1], dim=1).t(),
    "the first of several": lambda m, x: (m.fc(x[:, 0]), x),
    "by name": lambda m, x: {"logits": m.fc(x[:, 0]), "tokens": x},
}
EMBEDDINGS: dict[str, Callable[[Model, Tensor], object]] = {
    "a normalised token": lambda m, x: m.norm(x)[:, 0],
    "the stream's mean": lambda m, x: x.mean(1),
    "the norm of the mean": lambda m, x: m.norm(x.mean(1)),
    "a projection without a bias": lambda m, x: m.bare(x[:, 0]),
    "made of length one": lambda m, x: F.normalize(m.fc(x[:, 0]), dim=1),
    "a pooler": lambda m, x: m.fc(x[:, 0]).tanh(),
    "behind a BatchNorm": lambda m, x: m.batch(m.bare(x[:, 0])),
    "a gate": lambda m, x: m.fc(x[:, 0]) * m.other(x[:, 0]),
    "an MLP added to a pooled token": lambda m, x: (pooled := m.embed(x.mean(1))) + m.mlp(m.norm(pooled)),
    "the first of several": lambda m, x: (m.norm(x)[:, 0], m.fc(x[:, 0])),
}


def found(head: Callable[[Model, Tensor], object]) -> bool:
    torch.manual_seed(0)
    return FxGraph(capture("model", Model(head).eval(), (torch.randn(2, 4, WIDTH),)).module).gives_logits


@pytest.mark.parametrize("spelling", LOGITS)
def test_logits(spelling: str) -> None:
    assert found(LOGITS[spelling])


@pytest.mark.parametrize("spelling", EMBEDDINGS)
def test_embeddings(spelling: str) -> None:
    assert not found(EMBEDDINGS[spelling])
