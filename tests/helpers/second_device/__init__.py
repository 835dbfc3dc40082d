"""A second device for torch, which is the processor again: what would meet what lies elsewhere on a GPU is refused.

A process that `use`s it has it for good.
"""

import shutil
import subprocess
import sys
import types
from pathlib import Path

import torch

NAME = "second"
SOURCE = Path(__file__).with_name("device.cpp")
MEMORY = 4 << 30  # as it says itself


def built(folder: Path) -> Path | None:
    """The library that `use` takes, or None where there is no g++ on Linux."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        return None
    home, library = Path(torch.__file__).parent, folder / "second_device.so"
    headers = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    how = ["-std=c++20", "-shared", "-fPIC", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    linked = [f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(library)]
    subprocess.run([compiler, *how, *headers, str(SOURCE), *linked], check=True, timeout=300)
    return library


def use(library: Path) -> str:
    """Make the device known to torch; what it is called."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(str(library))
    there = types.ModuleType(f"torch.{NAME}")
    there.is_available = there.is_initialized = lambda: True  # type: ignore[attr-defined]
    there._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    there.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]
    there.device_count, there.current_device = (lambda: 1), (lambda: 0)  # type: ignore[attr-defined]
    there.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # type: ignore[attr-defined]
    there.memory_allocated = there.memory_reserved = lambda: 0  # type: ignore[attr-defined]
    there.mem_get_info = lambda: (MEMORY, MEMORY)  # type: ignore[attr-defined]
    torch._register_device_module(NAME, there)
    return f"{NAME}:0"
