"""Which instructions a program executes under qemu's user-mode emulation, and how often: exact, and no time.

Counted by a plugin (instruction_counter.c), which this machine's C compiler builds once. Emulators that are linked
statically (Debian's from qemu 8 on) load none.
"""

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from attnrewrite.targets.runners.cache import kept
from attnrewrite.targets.runners.programs import Failed, Unavailable, run

COMPILER = "cc"
PLUGIN = "counter.so"
BYTES = 4  # of an instruction of aarch64
TIMEOUT_S = 60  # seconds


@dataclass(frozen=True)
class Block:
    """Instructions that ran one after the other, in their bytes, and how many times."""

    code: bytes
    times: int

    @property
    def instructions(self) -> int:
        return len(self.code) // BYTES * self.times


def counting(plugin: Path, into: Path) -> list[str]:
    """The options with which the emulator writes what a program ran between its last two marks to a file."""
    return ["-plugin", f"{_escaped(plugin)},into={_escaped(into)}"]


def counter(emulator: str, trial: Sequence[str]) -> Path:
    """The plugin, built and tried on first use: `trial` is a program, and its arguments, that `emulator` runs.

    Raises:
        Unavailable: there is no compiler, or the emulator takes no such plugin.
    """
    if shutil.which(COMPILER) is None:
        raise Unavailable(f"a C compiler ({COMPILER}) is not installed to build the counter with")
    source = files("attnrewrite.targets.runners").joinpath("instruction_counter.c").read_bytes()
    version = run([emulator, "--version"], TIMEOUT_S)

    def build(folder: Path) -> None:
        (folder / "counter.c").write_bytes(source)
        run([COMPILER, "-O2", "-shared", "-fPIC", f"{folder}/counter.c", "-o", f"{folder}/{PLUGIN}"], TIMEOUT_S)
        try:
            run([emulator, *counting(folder / PLUGIN, folder / "trial"), *trial], TIMEOUT_S)
        except Failed as error:
            raise Unavailable(f"this emulator takes no plugin that counts ({error})") from error

    return kept(f"counter-{hashlib.sha256(source + version.encode()).hexdigest()[:12]}", build) / PLUGIN


def last_interval(counts: Path) -> tuple[Block, ...]:
    """What ran between the last two marks that a file tells of; nothing where there are fewer, or there is no file."""
    marks, *lines = counts.read_text().splitlines() if counts.is_file() else ["0"]
    ran: dict[int, Block] = {}
    for line in lines if int(marks) > 1 else ():
        address, times, code = line.split()
        before = ran.get(int(address), Block(b"", 0))
        # What the emulator has translated more than once, it may have cut at other places.
        longest = max(before.code, bytes.fromhex(code), key=len)
        ran[int(address)] = Block(longest, before.times + int(times))
    return tuple(_joined(ran))


def _joined(ran: Mapping[int, Block]) -> Iterator[Block]:
    """Blocks by address; what the emulator had cut in two, as at the end of a page, is whole again."""
    whole, end = Block(b"", 0), 0
    for address in sorted(ran):
        block = ran[address]
        if address == end and block.times == whole.times:
            whole = Block(whole.code + block.code, whole.times)
        else:
            if whole.times:
                yield whole
            whole = block
        end = address + len(block.code)
    if whole.times:
        yield whole


def _escaped(path: Path) -> str:
    return str(path).replace(",", ",,")
