"""How many cycles a core would take for what an emulator saw a program execute: LLVM's estimate (llvm-mca), no time.

Each block of instructions is taken as a loop of its own whose loads all hit the nearest cache, and whose branches are
all foreseen. LLVM knows some cores by another's tables: its release 14 reckons a Cortex-A76 as a Cortex-A57.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from attnrewrite.targets.runners.instructions import BYTES, Block
from attnrewrite.targets.runners.programs import Failed, Unavailable, run

ANALYSER, DISASSEMBLER = "llvm-mca", "llvm-mc"
HOT = 0.95  # of the instructions: the rest lies in thousands of blocks, and is taken at the others' mean
TIMEOUT_S = 60  # seconds
ARCHITECTURE = "aarch64"


@dataclass(frozen=True)
class Cycles:
    """`number` of cycles in one call; `how` says whose estimate it is, and of what."""

    number: int
    how: str


def estimated(blocks: Sequence[Block], core: str) -> Cycles:
    """The cycles that `core` (LLVM's name) takes for `blocks`, executed one after the other.

    Raises:
        Unavailable: llvm-mca is not installed, or does not know the core or too many of the instructions.
    """
    for tool in (ANALYSER, DISASSEMBLER):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not installed (Debian: llvm)")
    _analysed("nop", core)  # an unknown core is told at once
    why = ""
    total = sum(block.instructions for block in blocks)
    cycles, reached = 0.0, 0
    for block in sorted(blocks, key=lambda block: block.instructions, reverse=True):
        if reached >= HOT * total:
            break
        try:
            cycles += block.times * _analysed(_assembly(block, core), core)
            reached += block.instructions
        except Failed as error:  # an instruction that the core's tables lack, as atomic ones
            why = f" ({error})"
    if reached < HOT * total:
        raise Unavailable(f"{ANALYSER} knows {reached / total:.0%} of the code for {core}{why}")
    release = run([ANALYSER, "--version"], TIMEOUT_S).split("version", 1)[-1].split()[0]
    how = f"cycles estimated by {ANALYSER} of LLVM {release} with its tables for {core}, as if all loads hit the cache"
    return Cycles(round(cycles * total / reached), how)


def _assembly(block: Block, core: str) -> str:
    code = block.code
    words = "\n".join(" ".join(f"{byte:#04x}" for byte in code[at : at + BYTES]) for at in range(0, len(code), BYTES))
    text = run([DISASSEMBLER, "--disassemble", f"--arch={ARCHITECTURE}", f"-mcpu={core}"], TIMEOUT_S, words)
    lines = [line for line in text.splitlines() if line.strip() not in ("", ".text")]
    if (unknown := len(code) // BYTES - len(lines)) > 0:
        raise Failed(f"{DISASSEMBLER} does not know {unknown} instructions")
    return "\n".join(lines)


def _analysed(assembly: str, core: str) -> float:
    """The cycles of one pass through `assembly`, where it is a loop."""
    found = run([ANALYSER, f"--march={ARCHITECTURE}", f"-mcpu={core}", "--json"], TIMEOUT_S, assembly)
    summary = json.loads(found)["CodeRegions"][0]["SummaryView"]
    return float(summary["TotalCycles"] / summary["Iterations"])
