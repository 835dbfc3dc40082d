"""How many instructions a program executes under qemu's user-mode emulation: exact, and no time.

Counted by a plugin (instruction_counter.c), which this machine's C compiler builds once. Emulators that are linked
statically (Debian's from qemu 8 on) load none.
"""

import hashlib
import shutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from attnrewrite.targets.runners.cache import kept
from attnrewrite.targets.runners.programs import Failed, Unavailable, run

COMPILER = "cc"
PLUGIN = "counter.so"
TIMEOUT_S = 60  # seconds


def counting(plugin: Path, into: Path) -> list[str]:
    """The options with which the emulator writes the count at each of a program's marks to a file."""
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


def last_interval(counts: Path) -> int | None:
    """The instructions between the last two marks in a file; None where there are fewer, or there is no file."""
    marks = [int(line) for line in counts.read_text().split()] if counts.is_file() else []
    return marks[-1] - marks[-2] if len(marks) > 1 else None


def _escaped(path: Path) -> str:
    return str(path).replace(",", ",,")
