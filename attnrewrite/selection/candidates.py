"""Which attention forms the selection may choose from: named sets, or forms with their options as text."""

import re
from collections.abc import Sequence

from attnrewrite.errors import InputError, unknown_name
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import get_variant, option_values, variants

# The five papers' forms; MaiT masks some heads of a layer and leaves the others as they were.
PUBLISHED = ("l1", "mobile", "masked", "additive", "separable", "masked:heads=1", "masked:heads=2", "masked:heads=4")
SETTINGS = (
    "polynomial:rank=6",
    "polynomial:rank=8,degree=6",
    "polynomial:max_features=15",
    "l1:local=true",
    "relu-linear:local=true",
)
SETS = ("published", "all")


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
