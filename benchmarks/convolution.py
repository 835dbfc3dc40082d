"""Convolutions of 3 x 3 by our CPU schedules, by Winograd's algorithm and as they are written, beside other runtimes.

    python benchmarks/convolution.py [--shapes 96,96,56 576,224,56,1 ...] [--rounds 9] [--peers onnxruntime openvino]

float32, one thread, CPU time, batch 1, with a bias and a rectifier behind; a shape is channels in and out, the image's
side and the window's, 3 if that is left out. A share is what the multiply-adds as they are written would take at this
processor's peak (a loop of independent ones in registers, in turns with the rest), over the time: above 100 % for who
multiplies less. Errors are the largest, of the largest output in float64. Medians. What a call takes by itself is in
the figures, and with the others what they rearrange of the image and of the result.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import tvm
from peak import MULTIPLY_ADDS, peak
from runtimes import OURS, RUNTIMES, environment, measured
from torch import nn

from attnrewrite.targets.prepare import specialise
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm.importer import import_program
from attnrewrite.targets.tvm.schedules.cpu.winograd.rule import WINOGRAD
from attnrewrite.targets.tvm.schedules.pipelines import cpu as pipeline
from attnrewrite.targets.tvm.schedules.profile import profile
from attnrewrite.targets.tvm.schedules.rewrite import rewrite

SHAPES = (
    *((16, 16, 112), (32, 32, 112), (48, 48, 112), (64, 64, 112), (64, 64, 56), (96, 96, 56), (128, 128, 28)),
    *((224, 128, 28), (256, 256, 28), (128, 128, 20), (160, 160, 14), (256, 256, 14), (512, 160, 14), (192, 192, 7)),
    (512, 512, 7),
)
OTHERS = tuple(name for name in RUNTIMES if name != OURS)


class Convolution(nn.Module):
    def __init__(self, inner: int, outer: int, window: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inner, outer, window, padding=window // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(x).relu()


def ours(module: nn.Module, x: torch.Tensor, winograd: bool) -> tuple[str, float, Callable[[], object]]:
    """The rule that took the convolution, how far off the result is, and a call of the kernel."""
    processor, rules = profile("host"), [rule for rule in pipeline.RULES if winograd or rule != WINOGRAD]
    made = rewrite(import_program(specialise(module, (x,))), rules, processor)
    executable = pipeline.build(made.module, processor)
    (found,) = tvm_compat.bind(executable, (x,), 1)()
    exact = module.double()(x.double())
    module.float()
    error = float((torch.from_numpy(found) - exact).abs().max() / exact.abs().max())
    call, held = tvm.relax.VirtualMachine(executable, tvm.cpu())["main"], tvm.runtime.tensor(x.numpy())
    return made.decisions[-1].rule, error, lambda: call(held)  # the result stays where it is: `bind` would copy it


def row(shape: Sequence[int], loop: Callable[[], object], rounds: int, peers: list[str]) -> str:
    inner, outer, side, window = (*shape, 3)[:4]
    module, x = Convolution(inner, outer, window).eval(), torch.randn(1, inner, side, side)
    rule, error, chosen = ours(module, x, winograd=True)
    _, direct_error, direct = ours(module, x, winograd=False)
    calls = {OURS: chosen, "direct": direct, **{name: RUNTIMES[name](module, (x,))(1) for name in peers}, "peak": loop}
    times = {name: statistics.median(each) for name, each in measured(calls, time.process_time, rounds).items()}
    floor = times.pop("peak") * inner * outer * (window * side) ** 2 / MULTIPLY_ADDS
    shares = " | ".join(f"{floor / each:.0%}" for each in times.values())
    least = min((times[name] for name in peers), default=float("nan"))
    ratios = f"{times[OURS] / times['direct']:.2f} | {times[OURS] / least:.2f}"
    return (
        f"| {inner} | {outer} | {side} | {window} | {rule} | {shares} | {ratios} | {error:.1e} | {direct_error:.1e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", metavar="IN,OUT,SIDE[,WINDOW]", help="by default a table of common ones")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", nargs="*", choices=OTHERS, default=["onnxruntime", "openvino"], metavar="NAME")
    given = parser.parse_args()
    shapes = [tuple(map(int, each.split(","))) for each in given.shapes] if given.shapes else SHAPES
    torch.manual_seed(0)
    print(environment())
    columns = [
        "in",
        "out",
        "side",
        "window",
        "rule",
        "ours",
        "direct",
        *given.peers,
        "of direct",
        "of the best",
        "error",
        "direct's",
    ]
    print(f"| {' | '.join(columns)} |\n|{'-|' * len(columns)}")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        loop = peak(Path(folder))
        for shape in shapes:
            print(row(shape, loop, given.rounds, given.peers), flush=True)


if __name__ == "__main__":
    main()
