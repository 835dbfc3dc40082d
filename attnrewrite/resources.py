"""What this machine has left: memory and disk, in bytes; and sizes as people write them."""

import ctypes
import os
import re
import resource
import shutil
import sys
from pathlib import Path

from attnrewrite.errors import InputError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_CGROUP = Path("/sys/fs/cgroup")
_UNASKED = 2**26  # bytes that there is always room for


def parse_bytes(text: str | int) -> int:
    """'4GiB', '500 MB', '4G' (of 10^9) or a number of bytes.

    Raises:
        InputError: it is none of these, or not above zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?\s*", str(text).lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise InputError(f"{text!r} is no size of memory: write it as 4GiB, 500MB or a number of bytes")
    return size


def format_bytes(size: float) -> str:
    """Bytes in binary units, with one decimal place from MiB on: 3.7 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit in ("B", "KiB") else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def held_memory() -> int:
    """What this process holds now; where the system does not tell, the most that it has held."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def give_back() -> None:
    """Return to the system the pages that the C library keeps though nothing lies in them, where it can be asked to:
    gigabytes, after tensors of many sizes.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def free_memory() -> int:
    """What this process could still take without swapping: within its control group's limit, where it has one. Half of
    the machine's, where the system does not tell.
    """
    limits = [free for free in (_machine(), _control_group()) if free is not None]
    return max(0, min(limits)) if limits else (physical_memory() or 0) // 2


def require_memory(needed: int, what: str, way_out: str) -> None:
    """Raise InputError where `what` takes `needed` bytes, and so many are not free."""
    if needed > _UNASKED and needed > (free := free_memory()):
        sizes = f"{format_bytes(needed)} of memory, and {format_bytes(free)} are free"
        raise InputError(f"{what} takes some {sizes}; {way_out}")


def physical_memory() -> int | None:
    """What this machine has in all; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def free_disk(folder: Path) -> int:
    """What may still be written to the file system of `folder`."""
    return shutil.disk_usage(folder).free


def _machine() -> int | None:
    try:
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _control_group() -> int | None:
    try:
        most, now = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return None if most == "max" else int(most) - int(now) + _kept_of_files()
    except (OSError, ValueError):
        return None


def _kept_of_files() -> int:
    """What the control group holds of files that were read and goes where memory is needed; 0 where it is not told."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("inactive_file ")).split()[1])
    except (OSError, ValueError, StopIteration, IndexError):
        return 0
