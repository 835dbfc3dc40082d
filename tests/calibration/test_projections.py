"""Projections that the graph makes for a site, as something lies between: read with it, searched, and put back."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fits import HEADS, SIDE, WIDTH, Attention, Model, calibration, error_on_others, pictures
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from attnrewrite.calibration import fit, points
from attnrewrite.calibration.branches import branches
from attnrewrite.calibration.descent import UNTRACED, output, sampled, searched
from attnrewrite.calibration.fit import Fit
from attnrewrite.calibration.points import fit_points
from attnrewrite.calibration.projections import ROLES, Searched, TracedRead, TracedWrite, with_projections
from attnrewrite.calibration.segments import Segments
from attnrewrite.calibration.stage import StageInput
from attnrewrite.passes.site_module import ProjectedRead, SiteModule
from attnrewrite.variants.registry import get_variant

HEAD_DIM = WIDTH // HEADS


class Between(Attention):
    """Attention with something between the projection of queries and keys and their product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(HEAD_DIM), nn.LayerNorm(HEAD_DIM)
        self.gate = nn.Parameter(torch.ones(HEADS, 1, 1))
        angles = torch.arange(SIDE * SIDE)[:, None] * torch.tensor([1.0, 0.1]).repeat(2)
        self.register_buffer("angles", angles)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        out = F.scaled_dot_product_attention(*self.between(query, key), value)
        return self.proj(out.transpose(1, 2).reshape(-1, x.shape[1], WIDTH))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.qkv(x).reshape(-1, x.shape[1], 3, HEADS, HEAD_DIM)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value

    def between(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(query), self.second(key)


class Turned(Between):
    """By angles of their places (RoFormer), after a token that is not."""

    def between(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.turned(query), self.turned(key)

    def turned(self, heads: Tensor) -> Tensor:
        first, rest = heads[:, :, :1], heads[:, :, 1:]
        other = torch.cat([-rest[..., HEAD_DIM // 2 :], rest[..., : HEAD_DIM // 2]], -1)
        return torch.cat([first, rest * self.angles[1:].cos() + other * self.angles[1:].sin()], 2)


class NormedAndTurned(Turned):
    def between(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.turned(self.first(query)), self.turned(self.second(key))


class NormedApart(Between):
    """Heads are images of their own there, as where they are pooled (MViTv2)."""

    def between(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        parts = [heads.reshape(heads.shape[0] * HEADS, -1, HEAD_DIM) for heads in (query, key)]
        return self.first(parts[0]).reshape(query.shape), self.second(parts[1]).reshape(key.shape)


class NormedPlaces(Between):
    """Of tokens that are laid out as a picture."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.qkv(x.unflatten(1, (SIDE, SIDE))).reshape(-1, x.shape[1], 3, HEADS, HEAD_DIM)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value


class NormedPixels(Between):
    """Projected by a convolution of one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(WIDTH, 3 * WIDTH, 1)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.qkv(x.mT.unflatten(2, (SIDE, SIDE))).reshape(-1, 3, HEADS, HEAD_DIM, x.shape[1])
        query, key, value = packed.permute(1, 0, 2, 4, 3).unbind(0)
        return query, key, value


class AllNormed(Between):
    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().heads(x)
        return query, key, F.layer_norm(value, (HEAD_DIM,))


class Gated(Between):
    """The queries scale the result, too."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        out = F.scaled_dot_product_attention(*self.between(query, key), value) * query.sigmoid()
        return self.proj(out.transpose(1, 2).reshape(-1, x.shape[1], WIDTH))


class Folded(Between):
    """Heads are images of their own, so that their rows are no longer those of the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.flatten(0, 1) for part in self.heads(x))
        weights = torch.softmax(self.first(query) @ self.second(key).mT / 2, -1)
        out = (weights @ value).unflatten(0, (-1, HEADS))
        return self.proj(out.transpose(1, 2).reshape(-1, x.shape[1], WIDTH))


class Tempered(Between):
    """Cosines times a learned number for each head."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        scores = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT * self.gate.exp()
        return self.proj((scores.softmax(-1) @ value).transpose(1, 2).reshape(-1, x.shape[1], WIDTH))


class Heated(Between):
    """Nothing between but a learned number for each head, which the scores are multiplied with."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        weights = torch.softmax(query @ key.mT * self.gate.exp(), -1)
        return self.proj((weights @ value).transpose(1, 2).reshape(-1, x.shape[1], WIDTH))


class HeatedByImage(Heated):
    """A number for each head and image."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        weights = torch.softmax(query @ key.mT * (self.gate + x.mean((1, 2))[:, None, None, None]).exp(), -1)
        return self.proj((weights @ value).transpose(1, 2).reshape(-1, x.shape[1], WIDTH))


class Beside(Between):
    """A perceptron's inner values beside queries, keys and values, out of one map and into one (ViT-22B)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 5 * WIDTH)
        self.proj = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        packed, inner = self.qkv(x).split([3 * WIDTH, 2 * WIDTH], -1)
        heads = packed.reshape(-1, x.shape[1], 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        out = F.scaled_dot_product_attention(*self.between(query, key), value)
        return self.proj(torch.cat([out.transpose(1, 2).reshape(-1, x.shape[1], WIDTH), F.gelu(inner)], -1))


class BesidePixels(Beside):
    """The same by convolutions of one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(WIDTH, 5 * WIDTH, 1)
        self.proj = nn.Conv2d(3 * WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        packed, inner = self.qkv(x.mT.unflatten(2, (SIDE, SIDE))).split([3 * WIDTH, 2 * WIDTH], 1)
        heads = packed.reshape(-1, 3, HEADS, HEAD_DIM, x.shape[1]).permute(1, 0, 2, 4, 3)
        query, key, value = heads.unbind(0)
        out = F.scaled_dot_product_attention(*self.between(query, key), value)
        together = torch.cat([out.mT.reshape(-1, WIDTH, SIDE, SIDE), F.gelu(inner)], 1)
        return self.proj(together).flatten(2).mT


class NormedBehind(Attention):
    """A normalisation between the heads' outputs and their projection (BEiT-3)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.norm(self.attended(x)))

    def attended(self, x: Tensor) -> Tensor:
        packed = self.qkv(x).reshape(-1, x.shape[1], 3, HEADS, HEAD_DIM)
        out = F.scaled_dot_product_attention(*packed.permute(2, 0, 3, 1, 4).unbind(0))
        return out.transpose(1, 2).reshape(-1, x.shape[1], WIDTH)


class GatedBehind(NormedBehind):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.attended(x) * self.gate(x).sigmoid())


class OfPixels(NormedBehind):
    """An activation, then a map that is a convolution, normalised (LeViT's other spelling)."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Sequential(nn.Hardswish(), nn.Conv2d(WIDTH, WIDTH, 1, bias=False), nn.BatchNorm2d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = self.attended(x).mT.unflatten(2, (SIDE, SIDE))
        return self.proj(out).flatten(2).mT


class OfPlaces(NormedBehind):
    """Tokens laid out as a picture, channels last."""

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.norm(self.attended(x).unflatten(1, (SIDE, SIDE)))).flatten(1, 2)


class OfSomePixels(OfPixels):
    """Other channels go by attention (SHViT)."""

    def __init__(self) -> None:
        super().__init__()
        self.proj[1] = nn.Conv2d(2 * WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = [each.mT.unflatten(2, (SIDE, SIDE)) for each in (self.attended(x), x)]
        return self.proj(torch.cat(parts, 1)).flatten(2).mT


class ReadTwice(NormedBehind):
    """What the heads give is read by another, too."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.attended(x)
        return self.proj(self.norm(out)) + out.mean(1, keepdim=True)


TRACED: tuple[type[Between], ...] = (Between, Turned, NormedAndTurned, NormedApart, NormedPlaces, NormedPixels)
TRACED += (AllNormed, Tempered, Heated, HeatedByImage)
BEHIND: tuple[type[nn.Module], ...] = (Beside, BesidePixels, NormedBehind, GatedBehind)
BEHIND += (OfPlaces, OfPixels, OfSomePixels)
UNSEARCHED: dict[type[nn.Module], tuple[str, ...]] = {Gated: ("query",), Folded: ("query", "key")}


def model(attention: Callable[[], nn.Module], shared: bool = False) -> Model:
    made = Model("pre-norm")
    for block in made.blocks:
        block.attention = attention()
    if shared:
        made.blocks[1].attention.qkv = made.blocks[0].attention.qkv
    return made


def given(attention: Callable[[], nn.Module], form: str = "l1", shared: bool = False) -> StageInput:
    return calibration("between", get_variant(form), pictures(300), model=model(attention, shared))


def of_sites(found: StageInput) -> list[Searched]:
    points = [point for point in fit_points(found.student) if point.site]
    return [with_projections(found.student, point.node, point.reached) for point in points]


@pytest.mark.parametrize("attention", TRACED)
def test_what_a_site_reads_of_tokens_gives_what_it_gives_in_its_graph(attention: type[Between]) -> None:
    found = given(attention)
    for branch, around in zip([b for b in branches(found.student) if b.site], of_sites(found), strict=True):
        site, nodes = around.site, around.reads
        own = issubclass(attention, Heated)  # nothing lies between: the site projects them itself
        assert isinstance(site.query, ProjectedRead if own else TracedRead)
        assert isinstance(site.key, ProjectedRead if own else TracedRead)
        assert (site.core.temperature is not None) == (own or attention is Tempered)
        assert isinstance(site.value, TracedRead) == (attention is AllNormed)
        with Segments(found.student, found.images, found.processes) as student:
            stop = student.order[branch.stream] + 1
            _, values = next(student.run(stop, {branch.node, *branch.node.all_input_nodes, *nodes, *branch.reads}))
        wanted = branch.outputs(values[branch.node])
        sample = sampled(site, [values[node] for node in nodes], wanted, wanted[..., 0], len(wanted))
        assert sample.query is sample.key is sample.value
        torch.testing.assert_close(output(site, sample), wanted, rtol=0, atol=1e-5)
        few = sample.rows(torch.tensor([3, 1]))
        torch.testing.assert_close(output(site, few), wanted[[3, 1]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", BEHIND)
def test_a_site_gives_what_the_map_gives_that_it_reaches(attention: type[nn.Module]) -> None:
    found = given(attention)
    points = [point for point in fit_points(found.student) if point.site]
    assert len(points) == 2
    for point in points:
        assert point.branch is None
        assert point.reached is not None
        around = with_projections(found.student, point.node, point.reached)
        assert isinstance(around.site.output, TracedWrite)
        assert isinstance(around.site.query, TracedRead) == issubclass(attention, Beside)
        with Segments(found.student, found.images, found.processes) as student:
            end = point.reached.node
            _, values = next(student.run(student.order[end] + 1, {end, *around.reads}))
        wanted = point.reached.outputs(values[end]).flatten(1, -2)
        given_ones = [values[node] for node in around.reads]
        sample = sampled(around.site, given_ones, wanted, wanted[..., 0], len(wanted))
        torch.testing.assert_close(output(around.site, sample), wanted, rtol=0, atol=1e-5)
        few = sample.rows(torch.tensor([3, 1]))
        torch.testing.assert_close(output(around.site, few), wanted[[3, 1]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", UNSEARCHED)
def test_projections_that_others_read_or_that_are_not_followed_stay_as_they_are(attention: type[nn.Module]) -> None:
    found = given(attention)
    for point in fit_points(found.student):
        if point.site is not None:
            around = with_projections(found.student, point.node)
            own = {role for role in ROLES if getattr(around.site, role) is getattr(point.site, role)}
            assert own == {*UNSEARCHED[attention], "value"}  # which the site projects itself
            assert (around.begins is point.node) == (own == {*ROLES})


def test_a_site_that_others_read_too_reaches_no_map() -> None:
    assert [point.reached for point in fit_points(given(ReadTwice).student) if point.site] == [None, None]


def test_matrices_that_no_other_site_reads_are_searched() -> None:
    for shared in (False, True):
        found = given(Between, shared=shared)
        names = {id(own): name for name, own in found.student.named_parameters()}
        changed = [{names[id(own)] for own in searched(around.site) if id(own) in names} for around in of_sites(found)]
        assert [any("qkv" in name for name in each) for each in changed] == [not shared, not shared]
        assert not any("first" in name for each in changed for name in each)


class Early(Model):
    """The second block's queries, keys and values are made before the first block."""

    def __init__(self) -> None:
        super().__init__("pre-norm")
        for block in self.blocks:
            block.attention = AllNormed()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        first, second = self.blocks
        query, key, value = second.attention.heads(second.first(tokens))
        heads = *second.attention.between(query, key), value
        tokens = first(tokens)
        out = F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(-1, tokens.shape[1], WIDTH)
        tokens = tokens + second.attention.proj(out)
        return self.head((tokens + second.mlp(second.second(tokens))).mean(1))


def test_projections_that_the_fit_has_passed_stay_as_they_are() -> None:
    found = calibration("early", get_variant("l1"), pictures(300), model=Early())
    names = {id(own): name for name, own in found.student.named_parameters()}
    before = {name: tensor.clone() for name, tensor in found.student.state_dict().items()}
    first, second = (point for point in fit_points(found.student) if point.site is not None)
    notes = Fit().run(found).notes
    state = found.student.state_dict()
    changed = [
        any(not torch.equal(state[names[id(own)]], before[names[id(own)]]) for own in point.projections)
        for point in (first, second)
    ]
    assert all(point.projections for point in (first, second))
    assert changed == [True, False]
    assert notes == (f"{UNTRACED.format('query and key and value')}: {second.name}",)


@pytest.mark.parametrize(
    ("attention", "told"),
    [(Between, []), (NormedApart, []), *((own, [" and ".join(roles)]) for own, roles in UNSEARCHED.items())],
)
def test_projections_that_are_not_searched_are_named(attention: type[nn.Module], told: list[str]) -> None:
    found = given(attention)
    sites = ", ".join(point.name for point in fit_points(found.student) if point.site)
    assert Fit().run(found).notes == tuple(f"{UNTRACED.format(roles)}: {sites}" for roles in told)


def as_it_is(module: GraphModule, node: Node, reached: object = None) -> Searched:
    site = module.get_submodule(str(node.target))
    assert isinstance(site, SiteModule)
    return Searched(site, tuple(node.args), node)  # type: ignore[arg-type]


@pytest.mark.parametrize("attention", [Between, Beside, NormedBehind])
def test_the_fit_is_closer_with_the_projections_than_without(
    attention: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = []
    for alone in (False, True):
        if alone:
            for module in (fit, points):
                monkeypatch.setattr(module, "with_projections", as_it_is)
        found = given(attention)
        Fit().run(found)
        errors.append(error_on_others(found))
    assert errors[0] < errors[1]


def test_what_a_search_changed_in_the_graph_is_put_back() -> None:
    found = given(NormedAndTurned)
    before = {name: tensor.clone() for name, tensor in found.student.state_dict().items()}
    undo = [point.undo() for point in fit_points(found.student)]
    Fit().run(found)
    changed = {name for name, tensor in found.student.state_dict().items() if not torch.equal(tensor, before[name])}
    assert sum("qkv" in name for name in changed) >= 2
    for restore in undo:
        restore()
    for name, tensor in found.student.state_dict().items():
        assert torch.equal(tensor, before[name]), name
