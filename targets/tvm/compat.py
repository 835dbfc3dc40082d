"""The one door to TVM, whose names change every release. Written for TVM 0.27.

It hides: tvm.relax.build, get_default_pipeline and VirtualMachine, tvm.target.Target, tvm.runtime (tensor, load_module,
Executable.export_library, Module.imports, inspect_source), tvm.support.cc.cross_compiler, tvm_ffi.libinfo, and the
global functions runtime.config_threadpool, runtime.NumThreads, tvm.codegen.llvm.GetHostCPUName and GetHostCPUFeatures.
"""

import importlib.metadata
import itertools
import os
import shutil
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from attnrewrite.errors import CheckFailedError, InputError, Refusal, first_line
from attnrewrite.targets.prepare import arrays
from attnrewrite.targets.record import Decision
from attnrewrite.targets.runners.qemu import LIBRARIES, Packages
from attnrewrite.targets.tvm.schedules.precision import FP32, stored
from attnrewrite.targets.tvm.schedules.profile import profile as cpu_profile
from attnrewrite.targets.tvm.schedules.profile import require_llvm

CPU_SCHEDULE = "attnrewrite CPU schedules"
DEFAULT_SCHEDULE = "TVM's default pipeline"
_SHARED_PROCESSORS = -3  # threading::ThreadGroup::kSpecifyThreadShareAllCore: no thread is bound to a processor


def why_missing() -> Refusal | None:
    """Why TVM cannot be used here, or None when it can. Does not import it."""
    if find_spec("tvm"):
        return None
    return Refusal("not-installed", "apache-tvm is not installed (pip install 'attnrewrite[tvm]')")


def runtime_packages() -> Packages:
    """The packages that TVM's runtime consists of, and its C++ headers, for runners on other processors."""
    from tvm_ffi import libinfo

    versions = {package: importlib.metadata.version(package) for package in ("apache-tvm", "apache-tvm-ffi")}
    return Packages(versions, (libinfo.find_include_path(), libinfo.find_dlpack_include_path()))


def runtime_libraries() -> tuple[Path, ...]:
    """The libraries of TVM's runtime for this machine's processor, as its wheels hold them."""
    import tvm
    import tvm_ffi

    folders = [Path(package.__path__[0]) for package in (tvm, tvm_ffi)]
    homes = {folder.name: folder.parent for folder in folders}
    return tuple(homes[name.split("/")[0]] / name for name in LIBRARIES)


def profile(name: str) -> dict[str, Any]:
    """The GPU's device description `name` of profiles.toml."""
    return tomllib.loads(files("attnrewrite.targets").joinpath("profiles.toml").read_text())[name]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Scheduled:
    """A module compiled with our schedules, their name, what became of each of its values, and what it is for."""

    executable: Any
    schedule: str
    operators: tuple[Decision, ...]
    processor: Mapping[str, Any]


def build_for_cpu(
    relax_module: Any, core: str, system: str | None = None, precision: str = FP32, stands_for: str | None = None
) -> Scheduled:
    """Compile a Relax module with our schedules for a processor: a name in profiles.toml, or `host`; and for a system
    of profiles.toml, where that is not the processor's usual one. `precision` is what its products are computed in;
    what is stored is of the type that `stands_for`, another processor, stores in it (None: the processor itself).

    InputError for an unknown name, with the nearest.
    """
    dtype = stored(precision, cpu_profile(stands_for or core))
    made, _ = _compiled(relax_module, core, system, precision, dtype, lambda module: (module, ()))
    return made


def library_for_cpu(
    relax_module: Any, core: str, path: Path, compiler: str, system: str | None = None, precision: str = FP32
) -> Scheduled:
    """As `build_for_cpu`, linked to the shared library `path` with the C++ compiler `compiler`. Weights lie in the
    library's own pages, where it is in a format that we know to put them in (ELF).

    Raises:
        InputError: an unknown name, with the nearest; or the compiler fails.
    """
    from attnrewrite.targets.tvm.schedules import weights
    from attnrewrite.targets.tvm.weights_object import compiled

    if sys.platform == "darwin":
        made = build_for_cpu(relax_module, core, system, precision)
        export_library(made.executable, path, compiler)
        return made

    def apart(module: Any) -> tuple[Any, Sequence[np.ndarray]]:
        found = weights.apart(module)
        return found.module, found.weights

    made, held = _compiled(relax_module, core, system, precision, stored(precision, cpu_profile(core)), apart)
    with tempfile.TemporaryDirectory() as folder:
        parts = [compiled(held, compiler, runtime_packages().headers, Path(folder) / "weights.o")] if held else []
        export_library(made.executable, path, compiler, parts)
    return made


def _compiled(
    relax_module: Any,
    core: str,
    system: str | None,
    precision: str,
    dtype: str,
    apart: Callable[[Any], tuple[Any, Sequence[np.ndarray]]],
) -> tuple[Scheduled, Sequence[np.ndarray]]:
    """A module compiled with our schedules, which store `dtype`, and the weights that `apart` took out of it."""
    from attnrewrite.targets.tvm.schedules.pipelines import cpu as pipeline

    require_llvm()
    processor = cpu_profile(core).under(system).storing(dtype)
    try:
        scheduled = pipeline.schedule(relax_module, processor)
        module, held = apart(scheduled.module)
        executable = pipeline.build(module, processor)
    except Exception as error:
        raise CheckFailedError(f"TVM cannot compile the module for {core}: {first_line(error)}") from error
    schedule = f"{CPU_SCHEDULE} for {processor.description}, products in {precision}"
    return Scheduled(executable, schedule, scheduled.decisions, processor.words), held


def build(relax_module: Any, device: Mapping[str, Any]) -> Any:
    """Compile a Relax module for a device description with TVM's default pipeline.

    Raises:
        CheckFailedError: TVM cannot compile it.
    """
    import tvm

    try:
        target = tvm.target.Target(dict(device))
        return tvm.relax.build(relax_module, target, relax_pipeline=tvm.relax.get_default_pipeline(target))
    except Exception as error:
        raise CheckFailedError(f"TVM cannot compile the module for {device['kind']}: {first_line(error)}") from error


def why_no_linker() -> Refusal | None:
    """Why no library can be linked for this machine, or None when one can."""
    if _host_compiler():
        return None
    return Refusal("no-linker", "no C++ compiler was found to link a library with (install g++ or clang)")


def host_linker() -> str:
    """The C++ compiler that links a library for this machine.

    Raises:
        InputError: there is none.
    """
    compiler = _host_compiler()
    if compiler is None:
        raise InputError(f"cannot link a library: {why_no_linker()}")
    return compiler


def export_library(executable: Any, path: Path, compiler: str, parts: Sequence[Path] = ()) -> Path:
    """Link a compiled module, and the object files `parts`, to the shared library `path` with the C++ compiler
    `compiler`, and return `path`.

    Raises:
        InputError: the compiler cannot link it.
    """
    from tvm.support import cc

    linker = cc.cross_compiler(compiler, options=["-shared", "-fPIC"])
    try:
        executable.export_library(str(path), fcompile=linker, addons=[str(part) for part in parts])
    except Exception as error:
        # TVM's own first line only says that something failed.
        said = RuntimeError(str(error).removeprefix("Compilation error:"))
        raise InputError(f"{compiler} cannot link {path.name}: {first_line(said)}") from error
    return path


def export_objects(executable: Any, path: Path) -> Path:
    """Write a compiled module as the `.tar` of object files `path`, for whoever has the linker, and return `path`."""

    def bundle(output: str, objects: Sequence[str], **_: Any) -> None:
        with tarfile.open(output, "w") as archive:
            for member in objects:
                archive.add(member, Path(member).name)

    executable.export_library(str(path), fcompile=bundle)
    return path


def kernel_sources(executable: Any, kind: str) -> str:
    """The device code of kind `kind` (opencl) inside a compiled module, as one source text.

    Raises:
        CheckFailedError: there is no kernel of that kind in it.
    """
    pending, found = [executable.mod], []
    while pending:
        module = pending.pop()
        pending.extend(module.imports)
        if module.kind == kind:
            found.append(module.inspect_source())
    if not found:
        raise CheckFailedError(f"TVM compiled the module without a single {kind} kernel")
    return "\n".join(found)


def answering(compiled: Any, threads: int) -> Callable[[Sequence[Tensor]], tuple[np.ndarray, ...]]:
    """What a library (its path) or what `build` made gives for inputs, on this machine's processor.

    TVM has one thread pool for the process: the last one made decides its size.
    """
    import tvm

    main = _main(compiled, threads)
    return lambda inputs: tuple(each.numpy() for each in main(*map(tvm.runtime.tensor, arrays(inputs))))


def bind(compiled: Any, inputs: Sequence[Tensor], threads: int) -> Callable[[], tuple[np.ndarray, ...]]:
    """A call on this machine's processor of a library (its path) or of what `build` made, `inputs` already in place.

    TVM has one thread pool for each thread that calls it: the last call bound decides how many of the pool work.

    Raises:
        InputError: the pool is there already and has fewer threads.
    """
    import tvm

    main, arguments = _main(compiled, threads), [tvm.runtime.tensor(array) for array in arrays(inputs)]
    return lambda: tuple(result.numpy() for result in main(*arguments))


def _main(compiled: Any, threads: int) -> Any:
    import tvm

    loaded = tvm.runtime.load_module(str(compiled)) if isinstance(compiled, Path) else compiled
    machine = tvm.relax.VirtualMachine(loaded, tvm.cpu())
    _set_threads(threads)
    return machine["main"]


def _set_threads(threads: int) -> None:
    """Have `threads` of TVM's pool work, on any processor that this process may use.

    The first call makes the pool. Left to itself, TVM makes one of half the processors and binds the calling thread to
    the first of them, with all threads that it starts from then on.
    """
    allowed = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    places = [str(place) for place, _ in zip(itertools.cycle(sorted(allowed)), range(max(threads, len(allowed))))]
    _global("runtime.config_threadpool")(_SHARED_PROCESSORS, threads, places)
    found = _global("runtime.NumThreads")()
    if found != threads:
        way_out = "start a process for it, or ask for the most threads first"
        raise InputError(f"TVM's thread pool has {found} threads, and does not grow to {threads}: {way_out}")


def _host_compiler() -> str | None:
    return os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def _global(name: str) -> Any:
    import tvm

    return tvm.get_global_func(name)
