"""Names to variants: the built-in ones, those of the entry point group, and their options from strings."""

import importlib.metadata
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from attnrewrite.errors import InputError, unknown_name
from attnrewrite.variants.additive import Additive
from attnrewrite.variants.base import Variant
from attnrewrite.variants.l1 import L1
from attnrewrite.variants.masked import Masked
from attnrewrite.variants.mobile import Mobile
from attnrewrite.variants.polynomial import Polynomial
from attnrewrite.variants.relu_linear import Elu, ReluLinear
from attnrewrite.variants.separable import Separable
from attnrewrite.variants.small import CrossCovariance, Hedgehog, Hydra, Taylor
from attnrewrite.variants.softmax import Softmax

ENTRY_POINTS = "attnrewrite.variants"
BUILT_IN: tuple[type[Variant], ...] = (
    Softmax,
    L1,
    Mobile,
    Masked,
    Additive,
    Separable,
    Polynomial,
    ReluLinear,
    Elu,
    Hedgehog,
    Taylor,
    Hydra,
    CrossCovariance,
)
WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def variants() -> dict[str, type[Variant]]:
    """Every variant by name: the built-in ones first, then those that installed packages register."""
    known = {variant.name: variant for variant in BUILT_IN}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        known[point.name] = _load(point, known)
    return known


def _load(point: importlib.metadata.EntryPoint, known: Mapping[str, type[Variant]]) -> type[Variant]:
    if point.name in known:
        raise InputError(f"entry point {ENTRY_POINTS}: {point.value} takes the name {point.name!r}, which is in use")
    try:
        variant = point.load()
    except (ImportError, AttributeError) as error:
        raise InputError(f"entry point {ENTRY_POINTS}: {point.name!r} does not load: {error}") from error
    if not (isinstance(variant, type) and issubclass(variant, Variant)):
        raise InputError(f"entry point {ENTRY_POINTS}: {point.value} is not a subclass of Variant")
    return variant


def get_variant(name: str, options: Mapping[str, Any] | None = None) -> Variant:
    """The variant called `name`. Options are Python values, or strings as the command line gives them.

    Raises InputError for an unknown name or option, or a value of the wrong type or out of range.
    """
    known = variants()
    if name not in known:
        raise unknown_name("variant", name, known)
    variant, options = known[name], options or {}
    kinds = typing.get_type_hints(variant)
    names = {field.name for field in fields(variant)}
    for option in options:
        if option not in names:
            raise unknown_name(f"option of {name}", option, names)
    return variant(**{option: _parse(f"{name}: {option}", value, kinds[option]) for option, value in options.items()})


def option_values(variant: Variant) -> dict[str, Any]:
    """The options of `variant` as JSON values that `get_variant` accepts."""
    values = {field.name: getattr(variant, field.name) for field in fields(variant)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _parse(option: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`: bool, int, float, a Literal, a tuple of integers, None, or a union of these."""
    for candidate in _alternatives(kind):
        try:
            return _read(value, candidate)
        except (ValueError, TypeError):
            continue
    raise InputError(f"{option}={value!r} is not {_describe(kind)}")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _read(value: Any, kind: Any) -> Any:
    if kind is type(None) and value in (None, "none"):
        return None
    if typing.get_origin(kind) is Literal and value in typing.get_args(kind):
        return value
    if typing.get_origin(kind) is tuple and (isinstance(value, list | tuple) or _is_list(value)):
        parts = value.strip("[]").split(",") if isinstance(value, str) else value
        return tuple(int(part) for part in parts if str(part).strip())
    if kind is bool and (isinstance(value, bool) or str(value).lower() in WORDS):
        return value if isinstance(value, bool) else WORDS[str(value).lower()]
    if kind in (int, float) and not isinstance(value, bool) and (isinstance(value, str) or kind(value) == value):
        return kind(value)
    raise ValueError(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, str) and ("," in value or value.startswith("["))


def _describe(kind: Any) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", type(None): "none"}
    options = []
    for candidate in _alternatives(kind):
        if typing.get_origin(candidate) is Literal:
            options += [str(choice) for choice in typing.get_args(candidate)]
        else:
            options.append(words.get(candidate, "a comma-separated list of whole numbers"))
    return " or ".join(options)
