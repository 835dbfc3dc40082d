"""Operators that compilers lack, fail at or misread, in the spellings of vision models: both importers take them.

Some of a table at once are one module. TVM's side is checked up to its importer, whose translations have the shapes and
types that torch says; what is compiled of them is `tvm/test_importer.py`'s.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.errors import InputError
from attnrewrite.targets import agreement as check
from attnrewrite.targets.base import get_target
from attnrewrite.targets.prepare import arrays, canonical, reference, specialise

IMAGE, TOKENS, LINE, FILM = (1, 4, 8, 8), (1, 12, 8), (1, 4, 12), (1, 2, 4, 6, 6)
PLACES = torch.tensor([5, 0, -1])
BINS = torch.linspace(-2, 2, 7)
GROUPS = (torch.arange(12) % 4)[None, :, None].expand(1, 12, 8)


def changed(x: Tensor, place: object, value: object) -> Tensor:
    y = x.clone()
    y[place] = value  # type: ignore[index]
    return y


def grouped(x: Tensor, how: str, *, itself: bool = True) -> Tensor:
    return torch.full((1, 4, 8), 0.5).scatter_reduce(1, GROUPS, x, how, include_self=itself)


def quotients(x: Tensor) -> Tensor:
    """Some are infinite, none is no number."""
    return (x.abs() + 1) / x.round()


OPERATORS: dict[tuple[int, ...], dict[str, Callable[[Tensor], object]]] = {
    IMAGE: {
        "columns summed without overlaps": lambda x: F.fold(F.unfold(x, 2, stride=2) * 2, (8, 8), 2, stride=2),
        "padding from the other end": lambda x: F.pad(x, (1, 2, 3, 1), mode="circular"),
        "padding with a number": lambda x: F.pad(x, (1, 2, 0, 3), value=0.5) + F.pad(x, (1, 2, 3, 0), value=-2.0),
        "padding that takes away": lambda x: F.pad(x, (-1, 2, 0, -3)) * F.pad(x, (1, 0, -2, -1)),
        "largest and where": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
        "largest put back": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        "largest of windows with gaps": nn.MaxPool2d(3, 1, 1, dilation=2),
        "pooled by the window's size": lambda x: F.max_pool2d(x, (1, 8)) + F.avg_pool2d(x, (1, 8)),
        "sums of windows": nn.AvgPool2d(2, 2, divisor_override=1),
        "smoothed": lambda x: F.interpolate(x, (5, 6), mode="bilinear", antialias=True),
        "smoothed by cubes": lambda x: F.interpolate(x, (5, 6), mode="bicubic", antialias=True),
        "statistics that were learnt": nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        "spread along one axis": nn.ConvTranspose2d(4, 6, (3, 2), (1, 2), output_padding=(0, 1)),
        "sampled by a map": lambda x: F.grid_sample(
            x, F.affine_grid(x.mean((2, 3)).repeat(1, 2)[:, :6].view(1, 2, 3), [1, 4, 8, 8], False), align_corners=False
        ),
        "variance of everything": lambda x: x.var() + x.std() + torch.var_mean(x)[0] + torch.std_mean(x, (2, 3))[0],
        "place in everything": lambda x: (x.argmax(), x.argmin()),
        "medians": lambda x: (*x.median(-1), x.median(), x.kthvalue(3, -1).values),
        "products": lambda x: x.prod(1) + x.prod(),
        "any that is not zero": lambda x: torch.any(x.relu(), 1),
        "distances": lambda x: (torch.cdist(x[:, 0], x[:, 1]), torch.cdist(x[:, 0], x[:, 1], p=1)),
    },
    TOKENS: {
        "each as often as said": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0] * 4), 1, output_size=12),
        "changed where it is negative": lambda x: changed(x, x < 0, 0.5),
        "changed at places": lambda x: changed(x, (slice(None), PLACES), x[:, :3] * 2),
        "added at places": lambda x: x.index_add(1, torch.tensor([1, 3, 1]), x[:, :3], alpha=2),
        "put at pairs of places": lambda x: x.index_put((PLACES * 0, PLACES), torch.ones(3, 8)),
        "filled in order": lambda x: x.masked_scatter(torch.arange(96).reshape(1, 12, 8) % 2 == 0, x.flip(1)),
        "sums of groups": lambda x: grouped(x, "sum"),
        "means of groups": lambda x: grouped(x, "mean") - grouped(x, "mean", itself=False),
        "largest of groups": lambda x: grouped(x, "amax", itself=False) - grouped(x, "amin"),
        "stable order": lambda x: x.sort(dim=1, stable=True),
        "running extremes": lambda x: (*x.cummax(1), *x.cummin(2)),
        "extremes along an axis": lambda x: (*x.max(1), x.min(-1, keepdim=True)[0]),
        "running products": lambda x: (x.cumprod(-1), x.logcumsumexp(1)),
        "numbers of bins": lambda x: torch.bucketize(x, BINS) + torch.searchsorted(BINS, x, right=True),
        "diagonals": lambda x: x.diagonal(1, 1, 2) + x.diagonal(-1, 2, 1)[:, :1],
        "steep softplus": nn.Softplus(2.0, 3.0),
        "rests": lambda x: torch.fmod(x, 0.3) + torch.fmod(x, x.flip(1).abs() + 0.3) + x.trunc(),
        "inverses": lambda x: x.reciprocal(),
        "hyperbolic": lambda x: x.asinh() + (x.abs() + 1.1).acosh() + (x.tanh() * 0.9).atanh(),
        "extremes of numbers": lambda x: torch.fmax(x, x.flip(1)) - torch.fmin(x, 0.2 * x.flip(1)),
        "truths": lambda x: ((x > 0) & (x < 1) | ~(x > -1)) ^ (x > 0.5),
        "shifts": lambda x: ((x * 10).int() << 2) + ((x * 30).int() >> 1),
        "without infinities": lambda x: torch.nan_to_num(quotients(x), posinf=9.0) + torch.nan_to_num(x),
        "sums of products": lambda x: torch.addbmm(x[0, :8], x[:, :8], x[:, :8], beta=0.3, alpha=0.2),
        "a product with a vector": lambda x: x @ x[0, 0] + x[0, 0] @ x.mT,
        "bilinear": lambda x: F.bilinear(x, x.flip(1), x[0, :, :, None] * x[0, :, None]),
        "root of the mean square": lambda x: F.rms_norm(x, (8,)) + F.rms_norm(x, (12, 8), eps=1e-6),
        "and of small numbers": lambda x: F.rms_norm(x * 1e-3, (8,), x[0, 0], 1e-6) + F.rms_norm(x.relu() * 1e-4, (8,)),
        "nothing and a number": lambda x: (x * 2, None, 3),
    },
    LINE: {
        "a line resized": lambda x: F.interpolate(x, 7, mode="linear"),
        "a line repeated": lambda x: (F.interpolate(x, 7), F.interpolate(x, 7, mode="nearest-exact")),
        "parts of a line": lambda x: (F.adaptive_avg_pool1d(x, 5), F.adaptive_max_pool1d(x, 5)),
        "a line round": nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"),
    },
    FILM: {
        "a film resized": lambda x: F.interpolate(x, (3, 5, 8), mode="trilinear"),
        "a film repeated": lambda x: F.interpolate(x, (3, 5, 9)),
        "parts of a film": lambda x: (F.adaptive_avg_pool3d(x, (3, 4, 4)), F.adaptive_max_pool3d(x, 2)),
    },
}  # fmt: skip


class All(nn.Module):
    """The results of every operator of a table, by its name."""

    def __init__(self, operators: dict[str, Callable[[Tensor], object]]) -> None:
        super().__init__()
        self.operators = operators
        self.held = nn.ModuleList(each for each in operators.values() if isinstance(each, nn.Module))

    def forward(self, x: Tensor) -> dict[str, object]:
        return {name: operator(x) for name, operator in self.operators.items()}


AT_ONCE = 6  # what is written out again and again takes longer in one long module than in several
TABLES = [
    (shape, [*operators][start : start + AT_ONCE])
    for shape, operators in OPERATORS.items()
    for start in range(0, len(operators), AT_ONCE)
]
tables = pytest.mark.parametrize(("shape", "names"), TABLES, ids=[f"{names[0]} and others" for _, names in TABLES])


def table(shape: tuple[int, ...], names: list[str]) -> tuple[All, Tensor]:
    torch.manual_seed(0)
    return All({name: OPERATORS[shape][name] for name in names}).eval().requires_grad_(False), torch.randn(shape)


def alike(module: All, x: Tensor, found: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    names = [name for name, made in module(x).items() for _ in arrays(made)]
    for name, one, other in zip(names, found, expected, strict=True):
        check.agree(name, [one], [other], check.FLOAT32)


@tables
def test_tvms_importer_takes_them(shape: tuple[int, ...], names: list[str]) -> None:
    pytest.importorskip("tvm")
    from attnrewrite.targets.tvm.importer import readable

    module, x = table(shape, names)
    program, _ = readable(specialise(module, (x,)))
    alike(module, x, reference(program.module(), (x,)), reference(module, (x,)))


@tables
def test_core_ml_takes_them(shape: tuple[int, ...], names: list[str], tmp_path: Path) -> None:
    pytest.importorskip("coremltools")
    from attnrewrite.targets.coreml import interpreter, package
    from attnrewrite.targets.prepare import each_once

    module, x = table(shape, names)
    program, plain, _ = each_once(module, (x,))
    path = package.convert(canonical(program), tmp_path, "FLOAT32")
    with package.quiet():
        loaded = interpreter.load(path)
    (name,) = loaded.functions["main"].inputs
    found = arrays(tuple(interpreter.interpret(loaded, {name: x}).outputs.values()))
    alike(module, x, found, reference(plain, (x,)))


def test_outputs_that_a_package_has_once_are_noted(tmp_path: Path) -> None:
    target = get_target("coreml-npu")
    if (reason := target.availability().build) is not None:
        pytest.skip(str(reason))
    module = All({"doubled": lambda x: (x * 2, None)})
    made = target.lower("doubled", module, (torch.randn(TOKENS),), tmp_path, threads=1)
    assert made.notes == ("outputs that are no tensors, or given before, are left out",)
    assert len(made.outputs) == 1


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a size by value": (lambda x: x[x > 0], r"index\.Tensor \(node 'index'\) has a size that follows from values"),
    "complex numbers": (lambda x: torch.fft.fft(x).abs(), r"fft.* \(node '.*fft.*'\) is complex64"),
    "bfloat16": (lambda x: x.bfloat16().float(), r"\(node '.*'\) is bfloat16, which Core ML's code does not"),
    "a singular value": (lambda x: torch.linalg.svd(x)[1], r"no operator aten\..*svd.* \(node '.*svd.*'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_core_ml_refuses_by_operator_and_node(name: str, tmp_path: Path) -> None:
    target = get_target("coreml-npu")
    if (reason := target.availability().build) is not None:
        pytest.skip(str(reason))
    function, said = REFUSED[name]
    with pytest.raises(InputError, match=said) as caught:
        target.lower("it", All({"it": function}), (torch.randn(TOKENS),), tmp_path, threads=1)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
