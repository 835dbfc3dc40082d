"""Runs aarch64 libraries on other processors, under qemu's user-mode emulation: exact results and counts of executed
instructions, no meaningful times.

Needs qemu-user, the aarch64 cross-compiler, and TVM's aarch64 runtime, which its wheel for that processor holds. The
wheel is fetched once from the package index (some 100 MB) and what is needed of it kept in the user's cache folder;
with ATTNREWRITE_OFFLINE set nothing is fetched.
"""

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from attnrewrite.errors import CheckFailedError
from attnrewrite.targets.runners.cache import kept
from attnrewrite.targets.runners.instructions import Block, counter, counting, last_interval
from attnrewrite.targets.runners.programs import Failed, Unavailable, run

CROSS_COMPILER = "aarch64-linux-gnu-g++"
PLATFORM = "manylinux_2_28_aarch64"
RUNNER = "runner"
LIBRARIES = ("tvm/lib/libtvm_runtime.so", "tvm_ffi/lib/libtvm_ffi.so")
PROCESSOR = (
    "-cpu",
    "max,sve=off",
)  # all that phones' cores know; scalable vectors they do not, and the C library would
DOWNLOAD_S = 180  # seconds
COMPILE_S = 120  # seconds


@dataclass(frozen=True)
class Packages:
    """The packages whose aarch64 wheels hold the library's runtime, by version, and where their headers lie here."""

    versions: Mapping[str, str]
    headers: tuple[str, ...]


@dataclass(frozen=True)
class Executed:
    """The outputs of a call, and the blocks of code that a second one executed on one thread; none where `uncounted`
    says why they are not known.
    """

    outputs: tuple[np.ndarray, ...]
    blocks: tuple[Block, ...] = ()
    uncounted: str = ""

    @property
    def instructions(self) -> int | None:
        return sum(block.instructions for block in self.blocks) or None


def execute(library: Path, inputs: Sequence[np.ndarray], packages: Packages, timeout_s: float) -> Executed:
    """The outputs (float32) of an aarch64 library whose runtime is in `packages`, and what the call executed.

    The count is of the second call: the first one also does what is done once.

    Raises:
        Unavailable: it cannot be run here, or not in `timeout_s` seconds.
        CheckFailedError: it crashes.
    """
    if any(array.dtype != np.float32 for array in inputs):
        raise Unavailable("the emulated runner takes float32 inputs only")
    runner = runtime(packages) / RUNNER
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts"
        try:
            options, calls, uncounted = counting(counter_of(packages), counts), 2, ""
        except Unavailable as reason:
            options, calls, uncounted = [], 1, str(reason)
        arguments = []
        for index, array in enumerate(inputs):
            array.tofile(f"{folder}/input.{index}")
            arguments.append(f"{'x'.join(map(str, array.shape))}={folder}/input.{index}")
        command = [*emulated(runner, options), str(library.resolve()), f"{folder}/output", str(calls), *arguments]
        try:
            printed = run(command, timeout_s)
        except Failed as error:
            raise CheckFailedError(f"the aarch64 library crashes under emulation: {error}") from error
        shapes = [tuple(map(int, line.split())) for line in printed.splitlines()]
        outputs = [np.fromfile(f"{folder}/output.{index}", np.float32) for index in range(len(shapes))]
        ran = last_interval(counts)
    found = tuple(output.reshape(shape) for output, shape in zip(outputs, shapes, strict=True))
    return Executed(found, ran, "" if ran else uncounted or "the counter missed the program's marks")


def counter_of(packages: Packages) -> Path:
    """The plugin that counts what programs execute.

    Raises:
        Unavailable: they cannot be run here, or are not counted.
    """
    return counter(_emulator(), _guest(runtime(packages) / RUNNER))


def emulated(program: Path, options: Sequence[str] = ()) -> list[str]:
    """The command that runs an aarch64 program whose libraries lie beside it, on one thread.

    Raises:
        Unavailable: there is no emulator or no cross-compiler, whose libraries of C and C++ it runs with.
    """
    return [_emulator(), *options, *_guest(program)]


def _guest(program: Path) -> list[str]:
    libc = run([CROSS_COMPILER, "-print-file-name=libc.so.6"], COMPILE_S).strip()
    sysroot = str(Path(libc).resolve().parent.parent)
    return [
        *PROCESSOR,
        "-L",
        sysroot,
        "-E",
        f"LD_LIBRARY_PATH={program.parent}",
        "-E",
        "TVM_NUM_THREADS=1",
        str(program),
    ]


def _emulator() -> str:
    found = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if found is None:
        raise Unavailable("qemu-aarch64 is not installed (Debian: qemu-user)")
    return found


def runtime(packages: Packages) -> Path:
    """The cached folder with TVM's aarch64 libraries and the runner, made on first use.

    Raises:
        Unavailable: it is not there and cannot be made; the message says what is missing.
    """
    if shutil.which(CROSS_COMPILER) is None:
        raise Unavailable(f"{CROSS_COMPILER} is not installed (Debian: g++-aarch64-linux-gnu)")
    source = files("attnrewrite.targets.runners").joinpath("aarch64_runner.cc").read_bytes()

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as wheels:
            for wheel in _download(packages.versions, Path(wheels)):
                _extract(wheel, folder)
        _compile(source, folder, packages.headers)
        # Without arguments it only says how it is used: a failure now is this machine's, a later one the library's.
        run(emulated(folder / RUNNER), COMPILE_S)

    return kept("-".join(("aarch64", *packages.versions.values(), hashlib.sha256(source).hexdigest()[:12])), make)


def _download(versions: Mapping[str, str], folder: Path) -> list[Path]:
    if os.environ.get("ATTNREWRITE_OFFLINE"):
        raise Unavailable("TVM's aarch64 runtime is not in the cache, and ATTNREWRITE_OFFLINE forbids fetching it")
    if importlib.util.find_spec("pip") is None:
        raise Unavailable("TVM's aarch64 runtime is not in the cache, and there is no pip to fetch it with")
    wanted = [f"{package}=={version}" for package, version in versions.items()]
    options = ["--no-deps", "--only-binary=:all:", "--platform", PLATFORM, "--retries", "1", "--timeout", "10"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *quiet, *options, "--dest", str(folder), *wanted]
    try:
        run(command, DOWNLOAD_S)
    except Failed as error:
        raise Unavailable(f"TVM's aarch64 runtime could not be fetched ({error})") from error
    return sorted(folder.glob("*.whl"))


def _extract(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in set(LIBRARIES).intersection(archive.namelist()):
            (folder / Path(member).name).write_bytes(archive.read(member))


def _compile(source: bytes, folder: Path, headers: Sequence[str]) -> None:
    (folder / "runner.cc").write_bytes(source)
    includes = [f"-I{path}" for path in headers]
    libraries = [f"-L{folder}", "-Wl,--no-as-needed", "-ltvm_runtime", "-ltvm_ffi"]
    command = [CROSS_COMPILER, "-std=c++17", "-O1", *includes, f"{folder}/runner.cc", *libraries]
    run([*command, "-o", str(folder / RUNNER)], COMPILE_S)
