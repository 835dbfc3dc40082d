"""Integers of eight bits, four in a word of 32, and the instructions that add four products of them at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.tirx.script.builder import ir as T

from attnrewrite.targets.tvm.schedules.cpu import vectors
from attnrewrite.targets.tvm.schedules.cpu.integers import MOST
from attnrewrite.targets.tvm.schedules.cpu.vectors import Value
from attnrewrite.targets.tvm.schedules.profile import Profile

WORD = 4  # integers in a word
TURNS = 4  # words in a turn of a loop over them, or twice as many
SIGNS = -0x7F7F7F80  # 128 added to each integer of a word, as their signs are flipped
DEEPEST = 1 << 16  # products whose sum is sure to fit in 32 bits


@dataclass(frozen=True)
class Dot:
    """An instruction: `add(sums, left, right)` adds four products to each of several sums, its operands words.

    Where `unsigned`, left's integers have 128 added, and the sums start with what that adds less.
    """

    unsigned: bool
    add: Callable[[Value, Value, Value], Value]


def dot_of(profile: Profile) -> Dot | None:
    """The instruction that a processor has; None where it has none."""
    if "dotprod" in profile.features:
        return Dot(False, _sdot)
    return Dot(True, _vpdpbusd) if profile.features & {"avx512vnni", "avxvnni"} else None


def _sdot(sums: Value, left: Value, right: Value) -> Value:
    return T.call_llvm_pure_intrin("int32x4", "llvm.aarch64.neon.sdot.v4i32.v16i8", sums, _bytes(right), _bytes(left))


def _vpdpbusd(sums: Value, left: Value, right: Value) -> Value:
    lanes = vectors.lanes_of(sums)
    operation = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    return T.call_llvm_pure_intrin(f"int32x{lanes}", operation, sums, _bytes(left), _bytes(right))


def _bytes(words: Value) -> Value:
    return T.reinterpret(f"int8x{WORD * vectors.lanes_of(words)}", words)


def words(numbers: Value) -> Value:
    """A vector of numbers as words of the nearest integers, halves to even; their count is a multiple of WORD."""
    lanes = vectors.lanes_of(numbers)
    rounded = T.call_llvm_pure_intrin(f"float32x{lanes}", "llvm.roundeven", numbers)
    wide = T.call_llvm_pure_intrin(f"int16x{lanes}", "llvm.fptosi.sat", rounded)
    least, most = (tirx.Broadcast(tirx.const(bound, "int16"), lanes) for bound in (-MOST, MOST))
    bounded = T.Cast(f"int8x{lanes}", tirx.Min(tirx.Max(wide, least), most))
    return T.reinterpret("int32" if lanes == WORD else f"int32x{lanes // WORD}", bounded)


def flipped(word: Value) -> Value:
    """The words with 128 added to each of their integers."""
    lanes = vectors.lanes_of(word)
    signs = tirx.const(SIGNS, "int32")
    return T.bitwise_xor(word, signs if lanes == 1 else tirx.Broadcast(signs, lanes))


def packed(weight: np.ndarray, wide: int) -> np.ndarray:
    """Integers [depth, columns] as words [panels, groups, wide], filled up with zeros."""
    depth, columns = weight.shape
    across, groups = -(-columns // wide), groups_of(depth)
    filled = np.zeros((groups * WORD, across * wide), np.int8)
    filled[:depth, :columns] = weight
    parts = filled.reshape(groups, WORD, across, wide).transpose(2, 0, 3, 1)
    return np.ascontiguousarray(parts).view(np.int32)[..., 0]


def starts(weight: np.ndarray, wide: int) -> np.ndarray:
    """What the sums of each column begin with, where 128 is added to what its integers are multiplied with."""
    columns = weight.shape[1]
    found = np.zeros(-(-columns // wide) * wide, np.int32)
    found[:columns] = -128 * weight.astype(np.int32).sum(0)
    return found


def groups_of(depth: int) -> int:
    """How many words a row of so many integers takes: a multiple of TURNS."""
    return -(-depth // (TURNS * WORD)) * TURNS
