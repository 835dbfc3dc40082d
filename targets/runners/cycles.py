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
PASSES = 100  # through each block, as many as llvm-mca takes of itself
SUMMARY = ("--json", "--resource-pressure=false", "--instruction-info=false")
TIMEOUT_S = 120  # seconds, for all blocks together
ARCHITECTURE = "aarch64"
# Stands between blocks, so that one call disassembles them all: a breakpoint that no compiler writes.
BETWEEN, BETWEEN_CODE = "brk #0xbeef", bytes.fromhex("e0dd37d4")


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
    _analysed(["nop"], core, 1)  # an unknown core is told at once
    left: Sequence[Block] = sorted(blocks, key=lambda block: block.instructions, reverse=True)
    total = sum(block.instructions for block in blocks)
    cycles, reached, why = 0.0, 0, ""
    while left and reached < HOT * total:
        hot, left = _cut(left, HOT * total - reached)
        for block, found in zip(hot, _each(_assembly(hot, core), core), strict=True):
            if isinstance(found, Failed):
                why = f" ({found})"
            else:
                cycles += block.times * found
                reached += block.instructions
    if reached < HOT * total:
        raise Unavailable(f"{ANALYSER} knows {reached / total:.0%} of the code for {core}{why}")
    release = run([ANALYSER, "--version"], TIMEOUT_S).split("version", 1)[-1].split()[0]
    how = f"cycles estimated by {ANALYSER} of LLVM {release} with its tables for {core}, as if all loads hit the cache"
    return Cycles(round(cycles * total / reached), how)


def _cut(blocks: Sequence[Block], wanted: float) -> tuple[Sequence[Block], Sequence[Block]]:
    """The first blocks, as many as execute `wanted` instructions, and the others."""
    count, reached = 0, 0
    while count < len(blocks) and reached < wanted:
        reached += blocks[count].instructions
        count += 1
    return blocks[:count], blocks[count:]


def _assembly(blocks: Sequence[Block], core: str) -> list[str | Failed]:
    """Each block in the assembler's words."""
    code = BETWEEN_CODE.join(block.code for block in blocks)
    words = "\n".join(" ".join(f"{byte:#04x}" for byte in code[at : at + BYTES]) for at in range(0, len(code), BYTES))
    text = run([DISASSEMBLER, "--disassemble", f"--arch={ARCHITECTURE}", f"-mcpu={core}"], TIMEOUT_S, words)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip() not in ("", ".text")]
    told = [part.strip().splitlines() for part in "\n".join(lines).split(BETWEEN)]
    unknown = [len(block.code) // BYTES - len(part) for block, part in zip(blocks, told, strict=True)]
    return [
        Failed(f"{DISASSEMBLER} does not know {lost} instructions") if lost else "\n".join(part)
        for lost, part in zip(unknown, told, strict=True)
    ]


def _each(assembly: Sequence[str | Failed], core: str) -> list[float | Failed]:
    """The cycles of one pass through each part, where it is a loop; why not, where the core's tables lack something."""
    known = _known(assembly, core)
    found = iter(_analysed([part for part in known if isinstance(part, str)], core, PASSES))
    return [next(found) if isinstance(part, str) else part for part in known]


def _known(parts: Sequence[str | Failed], core: str) -> list[str | Failed]:
    """Each part, or why the core's tables do not serve it: at one instruction that they lack, as atomic ones are, the
    analyser refuses all parts together.
    """
    try:
        _analysed([part for part in parts if isinstance(part, str)], core, 1)
    except Failed as error:
        if len(parts) == 1:
            return [error]
        half = len(parts) // 2
        return _known(parts[:half], core) + _known(parts[half:], core)
    return [*parts]


def _analysed(parts: Sequence[str], core: str, passes: int) -> list[float]:
    """The cycles of one pass through each part, the mean of so many in a row."""
    if not parts:
        return []
    given = "\n".join(f"# LLVM-MCA-BEGIN {index}\n{part}\n# LLVM-MCA-END" for index, part in enumerate(parts))
    asked = [f"--march={ARCHITECTURE}", f"-mcpu={core}", f"--iterations={passes}", *SUMMARY]
    regions = json.loads(run([ANALYSER, *asked], TIMEOUT_S, given))["CodeRegions"]
    return [float(region["SummaryView"]["TotalCycles"] / passes) for region in regions]
