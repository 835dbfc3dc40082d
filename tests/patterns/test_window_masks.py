"""A mask that differs from window to window, as Swin's, is one of queries and keys whatever else joins the scores."""

import pytest
import torch
from torch import Tensor, nn

import attnrewrite as ar

WIDTH, HEADS, TOKENS = 16, 2, 16


class Windows(nn.Module):
    """One attention in windows of 16 tokens: `mask` [windows, 16, 16] is added to each window's scores."""

    def __init__(self, windows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.windows = windows
        self.embed, self.qkv = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.proj, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        mask = torch.zeros(windows, TOKENS, TOKENS)
        mask[1, :8, 8:] = -100
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x.flatten(2).transpose(1, 2)).reshape(-1, TOKENS, WIDTH)
        parts = self.qkv(tokens).reshape(-1, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        scores = query @ key.transpose(2, 3) * (WIDTH // HEADS) ** -0.5
        scores = scores.view(-1, self.windows, HEADS, TOKENS, TOKENS) + self.mask.unsqueeze(1).unsqueeze(0)
        out = scores.view(-1, HEADS, TOKENS, TOKENS).softmax(3) @ value
        out = self.proj(out.transpose(1, 2).reshape(-1, TOKENS, WIDTH))
        return self.head(out.view(len(x), self.windows * TOKENS, WIDTH).mean(1))


@pytest.mark.parametrize("windows", [2, 4, 5])
def test_a_mask_alone_is_not_one_of_the_keys(windows: int) -> None:
    model, example = Windows(windows).eval(), (torch.randn(1, 3, 4, 4 * windows),)
    (site,) = ar.explain(model, example).sites
    assert not site.bias_of_keys
    converted = ar.convert(model, example, variant="softmax").module
    torch.testing.assert_close(converted(*example), model(*example), rtol=1e-5, atol=1e-6)
