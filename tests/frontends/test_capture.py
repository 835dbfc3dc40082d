"""From a model to its graph: the batch is left open where it can be, and what cannot be exported is told apart."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnrewrite as ar
from attnrewrite.errors import InputError
from attnrewrite.frontends.capture import capture

X = torch.randn(1, 8, 16)


class Block(nn.Module):
    """Tokens [B, 8, 16] attend to each other; `tokens` is what a subclass makes of them first."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def tokens(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.tokens(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class OneImage(Block):
    def tokens(self, x: Tensor) -> Tensor:
        return x.reshape(1, 8, 16)


class Branching(Block):
    def tokens(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Choosing(Block):
    """Only the tokens that stand out are kept: how many, the data says."""

    def tokens(self, x: Tensor) -> Tensor:
        return x[:, x[0, :, 0].abs().argsort().unique()[:8]]


class Stretches(Block):
    """Tokens attend within stretches, by where these end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ends", torch.tensor([0, 3, 8]))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split((torch.tensor([0]) + self.ends).diff().tolist(), 1)
        return torch.cat([super(Stretches, self).forward(part) for part in parts], 1)


class Sampling(Block):
    """Attends over as many tokens as are drawn at random, and writes in place."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x[:, torch.rand(x.shape[1]) > 0.5]
        return super().forward(kept).add_(kept)


def test_the_batch_is_open_where_the_model_leaves_it_open() -> None:
    captured = capture("m", Block(), (X,))
    assert (captured.fixed_batch, captured.exact) == (None, True)
    assert captured.module(torch.randn(3, 8, 16)).shape == (3, 8, 16)


def test_a_model_for_one_image_is_captured_for_one_image() -> None:
    captured = capture("m", OneImage(), (X,))
    assert (captured.fixed_batch, captured.exact) == (1, True)
    assert captured.note


def test_shapes_that_follow_the_data_are_explained_and_not_converted(capfd: pytest.CaptureFixture[str]) -> None:
    (site,) = ar.explain(Choosing(), (X,)).sites
    assert (site.anchor, site.heads, site.scale) == ("sdpa", 2, pytest.approx(8**-0.5))
    with pytest.raises(InputError, match=r"Choosing cannot be captured .*; it can be explained, but not converted"):
        ar.convert(Choosing(), (X,), variant="l1")
    assert capfd.readouterr().err == ""


def test_lengths_that_a_model_computes_of_its_own_numbers_are_explained() -> None:
    first, second = ar.explain(Stretches(), (X,)).sites
    assert (first.n_queries, second.n_queries) == (3, 5)
    assert first.fingerprint == second.fingerprint


def test_as_many_tokens_as_are_drawn_are_explained_whatever_is_drawn() -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        (site,) = ar.explain(Sampling(), (X,)).sites
        assert site.n_queries == site.n_keys


def test_torchscript_is_explained_and_asks_for_what_it_was_made_of() -> None:
    traced = torch.jit.trace(Block().eval(), X)
    assert len(ar.explain(traced, (X,)).sites) == 1
    with pytest.raises(InputError, match="give the module that it was scripted or traced from; it can be explained"):
        ar.convert(traced, (X,), variant="l1")


def test_branches_that_follow_the_data_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"Branching cannot be captured by torch.export: .*control flow"):
        ar.explain(Branching(), (X,))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("batch", [1, 2])
def test_a_program_in_core_operators_has_the_same_site(batch: int) -> None:
    model, x = Block().eval(), torch.randn(batch, 8, 16)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},) if batch > 1 else None)
    core = program.run_decompositions()
    assert "scaled_dot_product_attention.default" not in str(core.graph)
    (wanted,), (found,) = ar.explain(program).sites, ar.explain(core).sites
    assert found.fingerprint == wanted.fingerprint
    assert found.core_reason is None
    done = ar.convert(core, variant="softmax")
    torch.testing.assert_close(done.module(x), model(x), rtol=1e-5, atol=1e-6)


class WholeLayer(nn.Module):
    """What torch's fast path makes of nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.qkv.weight, self.qkv.bias, self.proj.weight, self.proj.bias
        return torch._native_multi_head_attention(x, x, x, 16, 2, *weights, need_weights=False)[0]


class Gated(Block):
    """torch.cond: its branches are graphs of their own."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, super().forward, torch.clone, (x,))


@pytest.mark.parametrize(("model", "told"), [(WholeLayer(), "torch's fast path"), (Gated(), "^cond .* branch or a")])
def test_attention_inside_another_operator_is_a_near_miss(model: nn.Module, told: str) -> None:
    scan = ar.explain(model, (X,))
    assert (len(scan.sites), [miss.code for miss in scan.near_misses]) == (0, ["fused-layer"])
    assert re.search(told, scan.near_misses[0].sentence)
