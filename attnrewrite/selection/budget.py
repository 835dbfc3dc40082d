"""What `--variant auto` is asked for: a budget, and the forms it may choose from. Refused before any work is done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnrewrite.errors import InputError
from attnrewrite.selection.candidates import candidates as parsed
from attnrewrite.targets.base import get_target
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import get_variant

AUTO = "auto"
DEFAULT = ("all",)
EXAMPLE = "--max-drop 0.5, or --max-latency 0.7 --for host"


@dataclass(frozen=True)
class Auto:
    """Choose a variant for each site: lose at most `max_drop` points and replace as much as that allows, or come down
    to `max_latency` of the original's time on `target` and lose as little as that allows. One of the two is None.

    With `max_drop` and a `target`, what is saved there is what counts; without, the number of sites replaced and then
    multiply-adds. `asked` is how the `candidates` were named.
    """

    max_drop: float | None
    max_latency: float | None
    target: str | None
    asked: tuple[str, ...]
    candidates: tuple[Variant, ...]
    threads: int = 1

    name = AUTO


def requested(
    variant: str,
    options: Mapping[str, Any] | None = None,
    *,
    max_drop: float | None = None,
    max_latency: float | None = None,
    target: str | None = None,
    candidates: str | Sequence[str] | None = None,
    calibrated: bool = True,
    threads: int | None = None,
) -> Variant | Auto:
    """The variant called `variant`, or what `auto` is to choose by.

    Raises:
        InputError: an unknown name, a number out of range, or options that do not go together.
    """
    given = {"--max-drop": max_drop, "--max-latency": max_latency, "--for": target, "--candidates": candidates or None}
    if variant != AUTO:
        if extra := [name for name, value in given.items() if value is not None]:
            raise InputError(f"{extra[0]} is for --variant auto, and the variant is {variant}: leave one of them out")
        return get_variant(variant, options)
    if options:
        raise InputError(
            "--option belongs to one variant, and auto chooses among several: name it as a candidate with its options, "
            f"such as --candidates l1:{next(iter(options))}={next(iter(options.values()))}"
        )
    if (max_drop is None) == (max_latency is None):
        both = "no budget" if max_drop is None else "two budgets"
        raise InputError(f"--variant auto was given {both}, and takes one: {EXAMPLE}")
    if max_drop is not None and not 0 < max_drop < 100:
        raise InputError(f"--max-drop {max_drop:g} must lie between 0 and 100: it is in percentage points, such as 0.5")
    if max_latency is not None and not 0 < max_latency <= 1:
        raise InputError(
            f"--max-latency {max_latency:g} must lie above 0 and be at most 1: it is a part of the original's time"
        )
    if max_latency is not None and target is None:
        raise InputError("--max-latency needs to know where: --for host, or another target (attnrewrite targets)")
    if target is not None:
        get_target(target)
    if not calibrated:
        raise InputError("--variant auto needs images to measure what each choice costs: give --calibrate DATA")
    names = (candidates,) if isinstance(candidates, str) else tuple(candidates or DEFAULT)
    return Auto(max_drop, max_latency, target, names, parsed(names), threads or 1)
