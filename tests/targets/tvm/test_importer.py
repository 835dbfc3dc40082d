"""What TVM's importer lacks or misreads arrives all the same, in other operators; the rest is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.errors import InputError
from attnrewrite.targets import agreement as check
from attnrewrite.targets.prepare import reference, specialise
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm.importer import import_program, readable

pytest.importorskip("tvm")

IMAGE, TOKENS = (1, 4, 8, 8), (1, 12, 8)
PLACES = torch.tensor([5, 0, -1]), torch.tensor([[2], [-8]])
# What is lowered as it stands, by the shape of its input; all of each table in one module, which is compiled once.
OPERATORS: dict[tuple[int, ...], dict[str, Callable[[Tensor], Tensor]]] = {
    IMAGE: {
        "windows of an image as columns": lambda x: F.unfold(x, 3, padding=1, stride=2),
        "columns summed to an image": lambda x: F.fold(F.unfold(x, 3, padding=1, stride=2), (8, 8), 3, 1, 1, 2),
        "overlapping windows": lambda x: x.unfold(2, 4, 2).unfold(3, 4, 2),
        "indices along two axes": lambda x: x[:, :, PLACES[0], PLACES[1]],
        "indices along axes apart": lambda x: x[PLACES[0] * 0, :, :, PLACES[0]],
        "places of a channel": lambda x: F.pixel_shuffle(x, 2),
        "nearest, to an odd size": lambda x: F.interpolate(x, size=(11, 13), mode="nearest"),
        "linear by a factor": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        "linear from corner to corner": lambda x: F.interpolate(x, size=(13, 5), mode="bilinear", align_corners=True),
        "means of parts": lambda x: F.adaptive_avg_pool2d(x, (4, 2)),
        "normalised channels": lambda x: F.instance_norm(x),
        "means of parts that overlap": lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
        "side by side": lambda x: torch.stack([x, -x], -3),
        "again and again": lambda x: x.repeat(2, 1, 3, 1, 2),
        "a slope for each channel": nn.PReLU(4, 0.3),
        "sums of three factors": lambda x: torch.einsum("bchw,bdhw,e->ecd", x, x * x, torch.arange(3.0)),
        "spread with overlaps": nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1),
        "spread without, in groups": nn.ConvTranspose2d(4, 6, 2, 2, groups=2),
    },
    TOKENS: {
        "root of the mean square": lambda x: F.rms_norm(x, (8,), torch.full((8,), 2.0)),
        "each more than once": lambda x: x.repeat_interleave(3, 1),
        "deviation of a sample": lambda x: x.std(-1, keepdim=True),
        "variance of everything": lambda x: x.var((-1, -2), unbiased=False),
        "quotients rounded down": lambda x: torch.div(x, 2, rounding_mode="floor"),
        "quotients rounded to zero": lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
        "sums of multiples": lambda x: torch.add(x, x * x, alpha=2) + torch.sub(x, 1, alpha=3),
        "counts in arithmetic": lambda x: ((x > 0).sum(-1) / 3) * 0.5,
        "truths in arithmetic": lambda x: ((x > 0) * (x < 1) + (x < -1) * True).float(),
        "means along a line": lambda x: F.avg_pool1d(x, 2),
        "the mean of a line": lambda x: F.adaptive_avg_pool1d(x, 1),
        "means of parts of a line": lambda x: F.adaptive_avg_pool1d(x, 2),
        "means of parts of a line that overlap": lambda x: F.adaptive_avg_pool1d(x, 3),
        "windows along a line": nn.Conv1d(12, 10, 3, padding=1),
        "chosen by comparison": lambda x: torch.where(x > 0.1, x, 2.0 * x.roll(1, 1)),
        "powers and waves": lambda x: x.abs() ** 1.5 + torch.sin(x) + torch.cos(x) + x.abs().add(1).log() + x.floor(),
    },
    (2, 2, 4, 6, 6): {
        "patches of a film": nn.Conv3d(2, 3, (2, 3, 3), (2, 3, 3)),
        "windows of a film": nn.Conv3d(2, 4, 3, (1, 2, 1), (1, 0, 2), (1, 1, 2), groups=2),
        "frames of a film": nn.Conv3d(2, 2, (2, 1, 1), (2, 1, 1), dilation=(2, 1, 1), bias=False),
    },
}


class All(nn.Module):
    """The results of every operator of a table, side by side."""

    def __init__(self, operators: dict[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.operators = list(operators.values())
        self.held = nn.ModuleList(each for each in self.operators if isinstance(each, nn.Module))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(operator(x) for operator in self.operators)


def written(operators: dict[str, Callable[[Tensor], Tensor]], shape: tuple[int, ...]) -> tuple[All, Tensor, Any, Any]:
    """A module of all operators, an input, and the module's program as TVM reads it, in torch and in Relax."""
    torch.manual_seed(0)
    module, x = All(operators).eval(), torch.randn(shape)
    return module, x, *readable(specialise(module, (x,)))


@pytest.mark.parametrize("shape", OPERATORS)
def test_operators_are_written_out_as_they_are_meant(shape: tuple[int, ...]) -> None:
    module, x, program, _ = written(OPERATORS[shape], shape)
    with torch.no_grad():
        for name, one, other in zip(OPERATORS[shape], program.module()(x), module(x), strict=True):
            check.agree(name, [one.numpy()], [other.numpy()], check.FLOAT32)


def test_what_the_importer_misreads_is_compiled_right() -> None:
    names = ("deviation of a sample", "quotients rounded down", "sums of multiples", "counts in arithmetic")
    names += ("truths in arithmetic",)
    module, x, _, imported = written({name: OPERATORS[TOKENS][name] for name in names}, TOKENS)
    found = tvm_compat.bind(tvm_compat.build_for_cpu(imported, "host").executable, (x,), 1)()
    for name, one, other in zip(names, found, reference(module, (x,)), strict=True):
        check.agree(name, [one], [other], check.FLOAT32)


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (lambda x: torch.fft.rfft2(x).abs(), r"aten\.fft.* \(node '.*fft.*'\) is complex64"),
        (lambda x: torch.linalg.svd(x)[1], r"no operator aten.*svd.* \(node '.*svd.*'\)"),
    ],
)
def test_what_nothing_writes_out_is_refused_by_operator_and_node(operator: Callable, message: str) -> None:
    with pytest.raises(InputError, match=message):
        import_program(specialise(All({"operator": operator}), (torch.randn(TOKENS),)))
