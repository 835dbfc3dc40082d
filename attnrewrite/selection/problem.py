"""What a selection is asked: a model with the sites that may change, a budget, and the forms to choose from.

Refused before any work is done where these do not go together.
"""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from attnrewrite.errors import InputError, unknown_name
from attnrewrite.passes.fx.rewrite import with_variants
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import Scanned
from attnrewrite.request import Budget
from attnrewrite.site import AttentionSite
from attnrewrite.targets.base import get_target
from attnrewrite.variants.base import Variant, refusal_of
from attnrewrite.variants.linear import DROPPABLE, LinearVariant
from attnrewrite.variants.registry import get_variant, option_values, variants

AUTO = "auto"
DEFAULT = ("all",)
EXAMPLE = "--max-drop 0.5, or --max-latency 0.7 --for host"
# The five papers' forms; MaiT masks with squares of 3 or 5, and some heads of a layer or all.
PUBLISHED = (
    "l1", "mobile", "additive", "separable", "masked", "masked:heads=1", "masked:heads=2", "masked:heads=4",
    "masked:size=3", "masked:size=3,heads=1", "masked:size=3,heads=2", "masked:size=3,heads=4",
)  # fmt: skip
SETTINGS = (
    "polynomial:rank=6",
    "polynomial:rank=8,degree=6",
    "polynomial:max_features=15",
    "l1:local=true",
    "relu-linear:local=true",
)
SETS = ("published", "all")


@dataclass(frozen=True)
class Extraction:
    """The model to convert: `scanned` as captured, `teacher` the same with softmax written out at `sites`, those that
    a candidate can stand at. `example` is an input of one image, or of the only batch that the model takes
    (`fixed_batch`).
    """

    name: str
    scanned: Scanned[FxGraph]
    teacher: GraphModule
    sites: tuple[AttentionSite, ...]
    example: tuple[Tensor, ...]
    fixed_batch: int | None

    @property
    def original(self) -> GraphModule:
        return self.scanned.graph.module

    def rewritten(self, standing: Mapping[str, Variant]) -> GraphModule:
        """The original with these variants at their sites, by id."""
        return with_variants(self.scanned, standing)


@dataclass(frozen=True)
class Auto:
    """Choose one of `candidates` for each site: lose at most the budget's `max_drop` points and replace as much as that
    allows, or come down to `max_latency` of the original's time on `target` and lose as little as that allows. One of
    the two is None.

    With `max_drop` and a `target`, what is saved there is what counts; without, the number of sites replaced and then
    multiply-adds.
    """

    budget: Budget
    candidates: tuple[Variant, ...]

    name = AUTO

    def among(self, sites: Iterable[AttentionSite]) -> "Auto":
        """The same for a model of these `sites`: candidates may approximate biases where one of them refuses to, as
        what each loses is measured.
        """
        asked = itertools.product(self.candidates, sites)
        reasons = {reason.code for variant, site in asked if (reason := refusal_of(variant, site)) is not None}
        if reasons.isdisjoint(added.code for added in DROPPABLE.values()):
            return self
        rough = (replace(own, approximate=True) if isinstance(own, LinearVariant) else own for own in self.candidates)
        return replace(self, candidates=tuple(dict.fromkeys(rough)))


def requested(
    variant: str, options: Mapping[str, Any] | None = None, budget: Budget | None = None, *, calibrated: bool = True
) -> Variant | Auto:
    """The variant called `variant`, or what `auto` is to choose by.

    Raises:
        InputError: an unknown name, a number out of range, or options that do not go together.
    """
    budget = budget or Budget()
    if variant != AUTO:
        if extra := _given(budget):
            raise InputError(f"{extra[0]} is for --variant auto, and the variant is {variant}: leave one of them out")
        return get_variant(variant, options)
    if options:
        raise InputError(
            "--option belongs to one variant, and auto chooses among several: name it as a candidate with its options, "
            f"such as --candidates l1:{next(iter(options))}={next(iter(options.values()))}"
        )
    if (budget.max_drop is None) == (budget.max_latency is None):
        both = "no budget" if budget.max_drop is None else "two budgets"
        raise InputError(f"--variant auto was given {both}, and takes one: {EXAMPLE}")
    if budget.max_latency is not None and budget.target is None:
        raise InputError("--max-latency needs to know where: --for host, or another target (attnrewrite targets)")
    if budget.target is not None:
        get_target(budget.target)
    if not calibrated:
        raise InputError("--variant auto needs images to measure what each choice costs: give --calibrate DATA")
    return Auto(budget, candidates(budget.candidates or DEFAULT))


def _given(budget: Budget) -> list[str]:
    """The options that a budget was given by."""
    options = {
        "--max-drop": budget.max_drop,
        "--max-latency": budget.max_latency,
        "--for": budget.target,
        "--candidates": budget.candidates or None,
    }
    return [name for name, value in options.items() if value is not None]


def candidates(asked: Sequence[str]) -> tuple[Variant, ...]:
    """The forms named by `asked`, each once: "published", "all" (every known form), NAME or NAME:KEY=VALUE,...

    Softmax is a candidate at every site without being named.

    Raises:
        InputError: an unknown form or option, or one that changes more than its site.
    """
    found = dict.fromkeys(variant for text in asked for variant in _meant(text) if variant.name != "softmax")
    if not found:
        raise InputError(f"no candidates: give a set ({', '.join(SETS)}) or variants, such as l1 or masked:heads=1")
    return tuple(found)


def described(variant: Variant) -> str:
    """`variant` as `candidates` reads it: its name, and the options that are not its defaults."""
    defaults = option_values(type(variant)())
    changed = {name: value for name, value in option_values(variant).items() if value != defaults[name]}
    return variant.name + (":" if changed else "") + ",".join(f"{name}={_text(v)}" for name, v in changed.items())


def _meant(text: str) -> tuple[Variant, ...]:
    if text == "published":
        return tuple(_parsed(each) for each in PUBLISHED)
    if text == "all":
        return tuple(_parsed(each) for each in (*variants(), *PUBLISHED, *SETTINGS))
    return (_parsed(text),)


def _parsed(text: str) -> Variant:
    name, _, options = text.partition(":")
    if "," in name:
        raise InputError(f"candidate {text!r} is several: give each its own --candidates")
    if name not in variants():
        raise unknown_name("candidate", name, (*SETS, *variants()))
    pairs = re.split(r",(?=\w+=)", options) if options else []
    if bad := [pair for pair in pairs if not re.match(r"\w[\w-]*=", pair)]:
        raise InputError(f"candidate {text!r}: {bad[0]!r} is not KEY=VALUE, as in {name}:local=true")
    given = {key.replace("-", "_"): value for key, _, value in (pair.partition("=") for pair in pairs)}
    variant = get_variant(name, given)
    if "relu-for-gelu" in variant.follow_ups():
        raise InputError(f"candidate {text!r}: relu=true changes the MLPs, and a candidate changes its site only")
    return variant


def _text(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
