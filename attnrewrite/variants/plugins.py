"""Variants of other packages, registered through the entry point group `attnrewrite.variants`.

What a package registers is foreign code: it is seen to be a variant that can be used as the built-in ones are, or it is
left out with the reason, and nothing else suffers.
"""

import importlib.metadata
import logging
from functools import cache
from typing import Any

from attnrewrite.variants.base import Variant
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.options import option_values, with_options

ENTRY_POINTS = "attnrewrite.variants"
# What a subclass must define, and where a missing one would be found instead.
REQUIRED: tuple[tuple[type[Variant], tuple[str, ...]], ...] = (
    (LinearVariant, ("form", "form_multiplies")),
    (Variant, ("refuse", "build", "multiplies")),
)
log = logging.getLogger("attnrewrite")


@cache
def registered(taken: frozenset[str]) -> tuple[dict[str, type[Variant]], dict[str, str]]:
    """The variants that installed packages register, by name, and why each other entry is left out, which is logged.

    A name in `taken`, or one that two packages register, goes to nobody else.
    """
    found: dict[str, type[Variant]] = {}
    faults: dict[str, str] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        loaded = "takes a name that is in use" if point.name in {*taken, *found} else _load(point)
        if not isinstance(loaded, str):
            found[point.name] = loaded
            continue
        package = f" of {point.dist.name}" if point.dist else ""
        faults[point.name] = f"variant {point.name!r}{package} ({point.value}) {loaded}: mend or uninstall the package"
        log.warning("left out: %s", faults[point.name])
    return found, faults


def _load(point: importlib.metadata.EntryPoint) -> type[Variant] | str:
    """The variant that an entry point names, or what is wrong with it."""
    try:
        loaded = point.load()
    except (Exception, SystemExit) as error:  # foreign code raises what it likes
        return f"does not load, {_said(error)}"
    return _fault(point.name, loaded) or loaded


def _fault(name: str, loaded: Any) -> str | None:
    """Why what was registered as `name` cannot be used as a variant."""
    if not (isinstance(loaded, type) and issubclass(loaded, Variant)):
        return "is not a subclass of attnrewrite.variants.base.Variant"
    for text in ("name", "summary", "source"):
        if not isinstance(getattr(loaded, text, None), str):
            return f"has no {text}, which is to be a string"
    if loaded.name != name:
        return f"calls itself {loaded.name!r}, and a plan is read by that name"
    for base, methods in REQUIRED:
        for method in methods:
            if issubclass(loaded, base) and getattr(loaded, method) is getattr(base, method):
                return f"does not define {method}"
    try:
        default = loaded()
        again = with_options(loaded, option_values(default))
    except Exception as error:
        return f"cannot be made with its defaults, {_said(error)}"
    return None if again == default else "has options that a plan cannot keep (numbers, texts, choices, lists)"


def _said(error: BaseException) -> str:
    text = " ".join((str(error).strip() or "no message").split())
    return f"{type(error).__name__}: {text}"
