"""Executing what was compiled for other devices: what fails where a tool is missing, and what where the code is bad."""

import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from attnrewrite.errors import CheckFailedError, InputError, Refusal
from attnrewrite.targets.base import Artifact, get_target
from attnrewrite.targets.prepare import specialise
from attnrewrite.targets.runners import cycles, instructions, opencl, programs, qemu
from attnrewrite.targets.runners.instructions import Block
from attnrewrite.targets.runners.opencl import DeviceProgram, Launch, Output
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm import device as tvm_device
from attnrewrite.targets.tvm.importer import import_program

DOUBLE = DeviceProgram(
    inputs=("x",),
    constants={"c": np.array([1, 2, 3, 4], np.float32)},
    buffers={"x": 16, "c": 16, "y": 16},
    launches=(
        Launch("add", ("y", "x", "c"), (4, 1, 1), (2, 1, 1)),
        Launch("add", ("y", "y", "y"), (4, 1, 1), (4, 1, 1)),
    ),
    outputs=(Output("y", (2, 2), "float32"),),
    source="__kernel void add(__global float* y, __global float* a, __global float* b)"
    "{ int i = get_global_id(0); y[i] = a[i] + b[i]; }",
)
MODEL = nn.Sequential(nn.Linear(8, 4), nn.Softmax(-1)).eval()
INPUTS = (torch.randn(5, 8),)
X = np.array([10, 20, 30, 40], np.float32)


def run_or_skip(program: DeviceProgram) -> tuple[np.ndarray, ...]:
    try:
        return opencl.execute(program, [X], timeout_s=60)[0]
    except programs.Unavailable as reason:
        pytest.skip(str(reason))


def test_launches_run_in_order_on_named_buffers() -> None:
    (found,) = run_or_skip(DOUBLE)
    np.testing.assert_array_equal(found, [[22, 44], [66, 88]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": DOUBLE.source.replace("b[i]", "c[i]")}, "the OpenCL kernels crash"),
        ({"launches": (replace(DOUBLE.launches[0], kernel="subtract"),)}, "the OpenCL kernels crash"),
        ({"launches": (replace(DOUBLE.launches[0], local_size=(3, 1, 1)),)}, "the OpenCL kernels crash"),
    ],
)
def test_bad_kernels_are_the_artifacts_fault(change: dict, said: str) -> None:
    run_or_skip(DOUBLE)
    with pytest.raises(CheckFailedError, match=said):
        opencl.execute(replace(DOUBLE, **change), [X], timeout_s=60)


def test_without_pyopencl_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opencl, "find_spec", lambda name: None)
    with pytest.raises(programs.Unavailable, match="pyopencl is not installed"):
        opencl.execute(DOUBLE, [X], timeout_s=60)


def test_a_gpu_artifact_whose_kernels_could_not_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = get_target("gpu")
    if (reason := target.availability().build) is not None:
        pytest.skip(str(reason))
    monkeypatch.setattr(opencl, "find_spec", lambda name: None)
    made = target.lower("softmax", MODEL, INPUTS, tmp_path, threads=1)
    assert "kernels themselves were not run: pyopencl is not installed" in made.check


def test_every_kernel_of_a_program_is_read_with_its_extents() -> None:
    if (reason := tvm_compat.why_missing()) is not None:
        pytest.skip(str(reason))
    imported = import_program(specialise(MODEL, INPUTS))
    program = tvm_device.device_program(tvm_device.build(imported, tvm_compat.profile("gpu")))
    assert len(program.inputs) == 1
    assert program.buffers[program.inputs[0]] == 5 * 8 * 4
    assert sum(values.size for values in program.constants.values()) == 8 * 4 + 4
    assert program.outputs == (Output(program.outputs[0].buffer, (5, 4), "float32"),)
    for launch in program.launches:
        assert all(total % local == 0 for total, local in zip(launch.global_size, launch.local_size, strict=True))
        assert f"void {launch.kernel}(" in program.source


@pytest.fixture
def arm(tmp_path: Path):
    target = get_target("arm-cpu")
    if (reason := target.availability().build) is not None:
        pytest.skip(str(reason))
    return lambda: target.lower("softmax", MODEL, INPUTS, tmp_path, threads=1)


def test_without_the_aarch64_runtime_the_check_is_the_hosts_and_says_so(
    arm, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("ATTNREWRITE_OFFLINE", "1")
    made = arm()
    assert made.check.startswith("same program compiled for this host and run; aarch64 code not executed: ")


def test_without_a_cross_linker_there_are_object_files_and_the_reason(
    arm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = [folder for folder in os.get_exec_path() if not (Path(folder) / qemu.CROSS_COMPILER).exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(without))
    made = arm()
    assert made.files == ("artifact.json", "model.tar")
    with tarfile.open(tmp_path / "model.tar") as archive:
        assert all(archive.extractfile(name).read(4) == b"\x7fELF" for name in archive.getnames())
    assert made.notes == (f"object files instead of a library: {qemu.CROSS_COMPILER} is not installed to link them",)


def counted_or_skip(made: Artifact) -> int:
    if made.instructions is None:
        pytest.skip("; ".join((made.check, *made.notes)))
    return made.instructions


def test_instructions_are_counted_exactly_and_follow_the_work(arm, tmp_path: Path) -> None:
    found = counted_or_skip(arm())
    assert found == arm().instructions == json.loads((tmp_path / "artifact.json").read_text())["instructions"]
    # Four multiply-adds an instruction, one load at least for every four of them, and a start of some thousands.
    twice = (torch.randn(200, 64), nn.Linear(64, 64)), (torch.randn(400, 64), nn.Linear(64, 64))
    once, double = (
        get_target("arm-cpu").lower("linear", module.eval(), (x,), tmp_path, threads=1).instructions
        for x, module in twice
    )
    floor = 200 * 64 * 64 // 4
    assert floor < double - once < 3 * floor


def test_cycles_are_what_llvm_reckons_for_the_blocks_of_code_that_ran(arm, monkeypatch: pytest.MonkeyPatch) -> None:
    counted_or_skip(made := arm())
    if made.cycles is None:
        pytest.skip("; ".join(made.notes))
    assert "cycles estimated by llvm-mca of LLVM " in made.notes[-1]
    # A core of three instructions a cycle at most, and one that waits for each result in order.
    assert made.instructions / 4 < made.cycles < 10 * made.instructions
    multiply, add = bytes.fromhex("2010824f"), bytes.fromhex("0004408b")  # fmla v0.4s, v1.4s, v2.s[0]; add x0, x0, x0
    once, more = (cycles.estimated([Block(multiply, times)], "cortex-a55").number for times in (1_000, 3_000))
    assert more == pytest.approx(3 * once, rel=0.01)
    mixed = cycles.estimated([Block(multiply, 1_000), Block(add, 500)], "cortex-a55").number
    assert once < mixed < once + 4 * 500
    for broken, said in (
        (lambda: cycles.estimated([Block(multiply, 1)], "cortex-z1"), "'cortex-z1' is not a recognized processor"),
        (
            lambda: cycles.estimated([Block(b"\xff" * 4, 1)], "cortex-a55"),
            r"knows 0% of the code for cortex-a55 \(llvm-mc does not know 1 ",
        ),
    ):
        with pytest.raises(programs.Unavailable, match=said):
            broken()
    monkeypatch.setattr(cycles, "ANALYSER", "no-such-mca")
    without = arm()
    assert (without.cycles, without.notes[-1]) == (
        None,
        "cycles not estimated: no-such-mca is not installed (Debian: llvm)",
    )


def test_what_ran_between_marks_is_read_whole(tmp_path: Path) -> None:
    """The emulator cuts blocks at the end of a page, and translates some more than once."""
    told = tmp_path / "counts"
    lines = ["2", "4096 7 bbbbbbbb", "4092 7 aaaaaaaa", "8192 2 cccccccc", "8192 3 cccccccc", "8196 1 dddddddd"]
    told.write_text("\n".join(lines))
    assert instructions.last_interval(told) == (
        Block(bytes.fromhex("aaaaaaaabbbbbbbb"), 7),
        Block(b"\xcc" * 4, 5),
        Block(b"\xdd" * 4, 1),
    )
    told.write_text("1\n" + lines[1])
    assert instructions.last_interval(told) == instructions.last_interval(tmp_path / "none") == ()


def test_an_emulated_run_needs_time() -> None:
    with pytest.raises(InputError, match=r"emulation_s 0.0 must be a number of seconds above zero"):
        get_target("arm-cpu").configured(emulation_s=0.0)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"COMPILER": "no-such-cc"}, "instructions not counted: a C compiler (no-such-cc) is not installed to build"),
        ({"counting": lambda plugin, into: ["-plugin", "/no/plugin"]}, "this emulator takes no plugin that counts"),
    ],
)
def test_what_cannot_be_counted_says_why_and_is_checked_all_the_same(
    arm, broken: dict, said: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted_or_skip(arm())
    folder = tmp_path_factory.mktemp("counter")
    monkeypatch.setattr(instructions, "kept", lambda name, make: (make(folder), folder)[1])
    for name, value in broken.items():
        monkeypatch.setattr(instructions, name, value)
    made = arm()
    assert (made.check, made.instructions) == ("ran under qemu-aarch64", None)
    assert said in "; ".join(made.notes)
    pricing = get_target("arm-cpu").pricing()
    assert isinstance(pricing, Refusal)
    assert "instructions cannot be counted" in pricing.sentence


@pytest.mark.parametrize(
    ("command", "error", "said"),
    [
        (["no-such-program"], programs.Unavailable, "no-such-program cannot be started: No such file"),
        (["sh", "-c", "echo first >&2; echo then >&2; exit 3"], programs.Failed, "sh failed with status 3: first$"),
        (["sh", "-c", "exit 3"], programs.Failed, "sh failed with status 3: it says nothing"),
        (["sleep", "5"], programs.Unavailable, "sleep took more than 0 s"),
    ],
)
def test_a_tool_of_no_use_says_why(command: list[str], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        programs.run(command, 0.2)
    assert type(caught.value) is error
