"""Products of matrices by our CPU schedules, as a share of the multiply-adds that this processor can do in that time.

    python benchmarks/matmul.py [--rows 49 197 1024 4096] [--rounds 30]

float32, one thread, CPU time, the right operand packed as weights are. The peak is measured in turns with each product:
a loop of independent multiply-adds in registers, compiled by this machine's C++ compiler. What a call of the artifact
takes by itself is in the figures. Medians, and quartiles of the shares.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import tvm
from peak import MULTIPLY_ADDS, peak
from runtimes import environment, measured
from torch import nn

from attnrewrite.targets import agreement as check
from attnrewrite.targets.prepare import reference, specialise
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm.importer import import_program

WIDTHS = ((64, 64), (64, 256), (192, 576), (192, 768), (768, 192), (384, 1536), (1536, 384), (768, 3072), (3072, 768))


def product(rows: int, depth: int, columns: int) -> Callable[[], object]:
    """A call of our kernel, its result compared with torch's."""
    module, inputs = nn.Linear(depth, columns, bias=False), (torch.randn(1, rows, depth),)
    executable = tvm_compat.build_for_cpu(import_program(specialise(module, inputs)), "host").executable
    found = tvm_compat.bind(executable, inputs, 1)()
    check.agree(f"{rows} x {depth} x {columns}", found, reference(module, inputs), check.FLOAT32)
    call, held = tvm.relax.VirtualMachine(executable, tvm.cpu())["main"], tvm.runtime.tensor(inputs[0].numpy())
    return lambda: call(held)  # the result stays where it is: `bind` would copy it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[49, 197, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    torch.manual_seed(0)
    print(environment())
    print("| rows | depth | columns | GFLOP/s | of the peak | quartiles |\n|-|-|-|-|-|-|")
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        loop = peak(Path(folder))
        for rows, (depth, columns) in itertools.product(given.rows, WIDTHS):
            times = measured({"kernel": product(rows, depth, columns), "peak": loop}, time.process_time, given.rounds)
            work = rows * depth * columns
            rate = [2 * work / each / 1e6 for each in times["kernel"]]
            share = [work * theirs / mine / MULTIPLY_ADDS for mine, theirs in zip(*times.values(), strict=True)]
            low, middle, high = statistics.quantiles(share, n=4)
            shares.append(middle)
            cells = f"{statistics.median(rate):.0f} | {middle:.0%} | {low:.0%} to {high:.0%}"
            print(f"| {rows} | {depth} | {columns} | {cells} |", flush=True)
    print(f"median {statistics.median(shares):.0%}, least {min(shares):.0%}")


if __name__ == "__main__":
    main()
