"""Processors as schedules see them: how wide their vectors are, what their caches hold, which tiles keep them busy."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from attnrewrite.errors import InputError, unknown_name

HOST = "host"
FLOAT32, FLOAT16 = "float32", "float16"
SIZES = {FLOAT32: 4, FLOAT16: 2}  # bytes


@dataclass(frozen=True)
class Tile:
    """A block of results kept in registers: `rows` times `columns`."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Profile:
    """A processor core. `lanes` are the float32 of a vector register, `registers` how many of those there are.

    `by_lane`: a multiply-add takes its multiplier from any lane of a register (NEON); elsewhere it is broadcast from
    memory. `tiles` are for products, the widest first, `packed` for those whose left operand is packed, `dot_tile` for
    those of integers of eight bits. Caches in bytes.
    `stored` is the type of what kernels leave for others, of the weights of products, and of products.
    """

    name: str
    target: Mapping[str, Any]
    lanes: int
    registers: int
    by_lane: bool
    tiles: tuple[Tile, ...]
    packed: tuple[Tile, ...]
    dot_tile: Tile
    l1: int
    l2: int
    stored: str = FLOAT32

    @property
    def description(self) -> str:
        """The processor's name and what its vectors hold."""
        name = f"{self.name} ({self.target['mcpu']})" if self.name == HOST else self.name
        return f"{name}, {self.stored_lanes} {self.stored} a vector"

    @property
    def stored_lanes(self) -> int:
        """The numbers of the stored type in a vector register."""
        return self.lanes * SIZES[FLOAT32] // SIZES[self.stored]

    def storing(self, dtype: str) -> "Profile":
        """The same core for kernels that store and multiply numbers of a type: tiles of as many vectors."""

        def wider(tiles: tuple[Tile, ...]) -> tuple[Tile, ...]:
            return tuple(Tile(tile.rows, tile.columns * SIZES[self.stored] // SIZES[dtype]) for tile in tiles)

        return replace(self, stored=dtype, tiles=wider(self.tiles), packed=wider(self.packed))

    @property
    def features(self) -> frozenset[str]:
        """The instructions that it has beyond its architecture's own, in LLVM's words."""
        return frozenset(feature[1:] for feature in self.target.get("mattr", ()) if feature.startswith("+"))

    def under(self, system: str | None) -> "Profile":
        """The same core under another system: one of `systems()`; None for the one that it has."""
        if system is None:
            return self
        return replace(self, target={**self.target, "mtriple": _tables()["system"][system]})

    @property
    def words(self) -> dict[str, Any]:
        """The processor in the compiler's words, without the features that it lacks."""
        mattr = [feature for feature in self.target.get("mattr", ()) if not feature.startswith("-")]
        return {**self.target, "mattr": mattr}

    def __hash__(self) -> int:
        return hash((self.name, self.lanes, self.tiles, self.stored))


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(files("attnrewrite.targets").joinpath("profiles.toml").read_text(encoding="utf-8"))


def cores() -> tuple[str, ...]:
    """The names of the processors that profiles.toml describes; `host` is the one we are on."""
    return (*_tables()["cpu"], HOST)


def arm_cores() -> tuple[str, ...]:
    """The names of those that are 64-bit ARM."""
    arm = set(_tables()["system"].values())
    return tuple(name for name, core in _tables()["cpu"].items() if core["mtriple"] in arm)


def systems() -> dict[str, str]:
    """The systems that ARM cores are found under, by name, and LLVM's triple for code for each."""
    return dict(_tables()["system"])


def system_of(core: str) -> str:
    """The system that an ARM core is usually found under."""
    return next(name for name, triple in systems().items() if triple == _tables()["cpu"][core]["mtriple"])


def precisions() -> tuple[str, ...]:
    """The names of the precisions that products are computed in."""
    return tuple(_tables()["precision"])


def features_for(precision: str) -> tuple[str, ...]:
    """The features of which a processor must have one to compute in a precision; none where all do."""
    return tuple(_tables()["precision"][precision]["any_of"])


def stored_for(precision: str) -> str:
    """The type of what is stored and multiplied in a precision, on cores that compute in it."""
    return str(_tables()["precision"][precision]["stored"])


def profile(name: str) -> Profile:
    """The processor `name`. InputError with the nearest name where there is none."""
    if name == HOST:
        return host()
    tables = _tables()
    if name not in tables["cpu"]:
        raise unknown_name("processor", name, cores())
    core = dict(tables["cpu"][name])
    numbers = {key: core.pop(key) for key in ("l1", "l2")}
    return _profile(name, core.pop("isa"), core, **numbers)


def host() -> Profile:
    """This machine's processor, as LLVM sees it: its name and the features that are on; a hypervisor may mask some.

    InputError where TVM has no LLVM.
    """
    import tvm

    require_llvm()
    features = tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")()
    found = {str(feature) for feature, on in features.items() if on}
    mattr = [f"{'+' if on else '-'}{feature}" for feature, on in sorted(features.items())]
    target = {"kind": "llvm", "mcpu": tvm.get_global_func("tvm.codegen.llvm.GetHostCPUName")(), "mattr": mattr}
    isa = next(name for name, table in _tables()["isa"].items() if set(table["needs"]) <= found)
    return _profile(HOST, isa, target, **_tables()["host"])


def require_llvm() -> None:
    """Do nothing where this TVM compiles for processors. Raises InputError where it does not."""
    import tvm

    if tvm.get_global_func("target.build.llvm", allow_missing=True) is None:
        raise InputError("this TVM was built without LLVM: install the one of pip install 'attnrewrite[tvm]'")


def _profile(name: str, isa: str, target: Mapping[str, Any], l1: int, l2: int) -> Profile:
    table = _tables()["isa"][isa]
    return Profile(
        name=name,
        target=target,
        lanes=table["lanes"],
        registers=table["registers"],
        by_lane=table["by_lane"],
        tiles=tuple(Tile(*tile) for tile in table["tiles"]),
        packed=tuple(Tile(*tile) for tile in table.get("packed", ())),
        dot_tile=Tile(*table["dot_tile"]),
        l1=l1,
        l2=l2,
    )
