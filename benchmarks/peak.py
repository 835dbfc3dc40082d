"""The multiply-adds that one thread of this processor can do: what benchmarks hold our kernels against."""

import ctypes
from collections.abc import Callable
from pathlib import Path

from attnrewrite.targets.runners.programs import run
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm.schedules.profile import profile

MULTIPLY_ADDS = 2**27  # of one call of the loop
COMPILING_S = 120  # seconds
LOOP = """
typedef float vector __attribute__((vector_size({bytes})));
extern "C" float peak(long steps, float start) {{
    vector sums[{sums}], factor = {{}}, other = {{}};
    factor += 0.999f; other += start;
    for (auto &each : sums) each = other;
    for (long step = 0; step < steps; ++step) {{
        _Pragma("GCC unroll {sums}")
        for (int i = 0; i < {sums}; ++i) sums[i] = sums[i] * factor + other;
    }}
    float total = 0;
    for (auto &each : sums) for (int i = 0; i < {lanes}; ++i) total += each[i];
    return total;
}}
"""


def peak(folder: Path) -> Callable[[], object]:
    """A call that does MULTIPLY_ADDS in registers, in chains enough to hide what one takes."""
    processor = profile("host")
    chains = processor.registers - 4
    source = LOOP.format(bytes=4 * processor.lanes, sums=chains, lanes=processor.lanes)
    (folder / "peak.cpp").write_text(source)
    flags = ["-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
    run([tvm_compat.host_linker(), *flags, f"{folder}/peak.cpp", "-o", f"{folder}/peak.so"], COMPILING_S)
    loop = ctypes.CDLL(f"{folder}/peak.so").peak
    loop.restype, loop.argtypes = ctypes.c_float, (ctypes.c_long, ctypes.c_float)
    steps = MULTIPLY_ADDS // (chains * processor.lanes)
    return lambda: loop(steps, 0.5)
