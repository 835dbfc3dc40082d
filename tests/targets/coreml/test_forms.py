"""Every form in the Neural Engine's spelling: it breaks no rule, and float16 costs what rounding does."""

import pytest
import torch
from torch import Tensor, nn
from variant_sites import make_site

from attnrewrite.passes.fx.decompositions import Decompose
from attnrewrite.passes.fx.misread import WRITTEN_OUT
from attnrewrite.site import AttentionSite, Grid
from attnrewrite.targets.coreml import interpreter, package, spelling
from attnrewrite.targets.coreml.engine_rules import lint
from attnrewrite.targets.coreml.pipeline import coreml_pipeline
from attnrewrite.targets.prepare import specialise
from attnrewrite.variants.registry import BUILT_IN

ct = pytest.importorskip("coremltools", reason="coremltools is not installed")

WIDTH = 32
GRID, PREFIXED = (make_site(heads=2, head_dim=16, grid=Grid(4, 8, prefix=prefix)) for prefix in (0, 1))
VARIANTS = {variant.name: variant for variant in BUILT_IN}
FORMS = {name: (name, GRID) for name in VARIANTS} | {"l1 behind a class token": ("l1", PREFIXED)}
LEAST_SNR = 40.0  # dB: rounding alone costs some 60


class Site(nn.Module):
    """What stands around a form in a block: one packed projection before it, one behind."""

    def __init__(self, name: str, site: AttentionSite) -> None:
        super().__init__()
        self.heads, self.form = site.heads, VARIANTS[name]().build(site).eval().deploy()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.form(*packed.unbind(0)).transpose(1, 2).flatten(2)).transpose(1, 2)


class Sites(nn.Module):
    """Every form at its sites, over the tokens of one image [1, channels, rows, columns]."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.sites = nn.ModuleList(Site(name, site) for name, site in FORMS.values())

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        tokens = image.flatten(2).transpose(1, 2)
        given = torch.cat([self.token.expand(len(image), -1, -1), tokens], 1)
        return tuple(
            made(given if site is PREFIXED else tokens)
            for made, (_, site) in zip(self.sites, FORMS.values(), strict=True)
        )


@pytest.fixture(scope="module")
def lowered() -> tuple[object, Tensor, tuple[Tensor, ...]]:
    """The program in float16 and the engine's layout, an image, and what torch gives for it."""
    torch.manual_seed(0)
    module, image = Sites().eval(), torch.randn(1, WIDTH, 4, 8)
    program = spelling.readable(Decompose(WRITTEN_OUT)(specialise(module, (image,))))
    with package.quiet():
        made = ct.convert(
            program, convert_to="milinternal", minimum_deployment_target=ct.target.iOS17,
            compute_precision=ct.precision.FLOAT16, pass_pipeline=coreml_pipeline(),
        )  # fmt: skip
    with torch.inference_mode():
        return made, image, module(image)


@pytest.fixture(scope="module")
def found(lowered) -> dict[str, Tensor]:
    program, image, _ = lowered
    result = interpreter.interpret(program, {next(iter(program.functions["main"].inputs)): image})
    assert result.overflowed == ()
    return dict(zip(FORMS, result.outputs.values(), strict=True))


@pytest.mark.parametrize("name", FORMS)
def test_a_form_in_float16_is_what_it_is_in_torch(name: str, lowered, found) -> None:
    expected = lowered[2][list(FORMS).index(name)]
    noise = (found[name] - expected).square().sum()
    assert 10 * float(torch.log10(expected.square().sum() / noise)) > LEAST_SNR


def test_no_form_breaks_a_rule(lowered) -> None:
    report = lint(lowered[0])
    assert [each for each in report.operators if each.broken] == []
    assert report.staying() == (1.0, 1.0)
