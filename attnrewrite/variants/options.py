"""A variant's options: its dataclass fields, from Python values or from strings, and back to JSON values."""

import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from attnrewrite.errors import InputError, required, unknown_name
from attnrewrite.variants.base import Variant

WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
NAMED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "none"}


def with_options(variant: type[Variant], options: Mapping[str, Any]) -> Variant:
    """`variant` with these options: Python values, or strings as the command line gives them.

    Raises InputError for an unknown option, or a value of the wrong type or out of range.
    """
    required("options", options, Mapping)
    kinds = typing.get_type_hints(variant)
    names = {field.name for field in fields(variant)}
    for option in options:
        if option not in names:
            raise unknown_name(f"option of {variant.name}", option, names)
    given = {name: _parse(f"{variant.name}: {name}", value, kinds[name]) for name, value in options.items()}
    try:
        return variant(**given)
    except (ValueError, TypeError) as error:  # a package's own way to say that a value is out of range
        raise InputError(f"{variant.name}: {' '.join(str(error).split())}") from error


def option_values(variant: Variant) -> dict[str, Any]:
    """The options of `variant` as JSON values that `get_variant` accepts."""
    values = {field.name: getattr(variant, field.name) for field in fields(variant)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _parse(option: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`: bool, int, float, str, a Literal, a tuple of one of them, None, or a union of these."""
    for candidate in _alternatives(kind):
        try:
            return _read(value, candidate)
        except (ValueError, TypeError, OverflowError):
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
        item = typing.get_args(kind)[0]
        parts = [part.strip() if isinstance(part, str) else part for part in parts]
        return tuple(_read(part, item) for part in parts if part != "")
    if kind is bool and (isinstance(value, bool) or str(value).lower() in WORDS):
        return value if isinstance(value, bool) else WORDS[str(value).lower()]
    if kind in (int, float) and not isinstance(value, bool) and (isinstance(value, str) or kind(value) == value):
        return kind(value)
    if kind is str and isinstance(value, str):
        return value
    raise ValueError(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, str) and ("," in value or value.startswith("["))


def _describe(kind: Any) -> str:
    options = []
    for candidate in _alternatives(kind):
        if typing.get_origin(candidate) is Literal:
            options += [str(choice) for choice in typing.get_args(candidate)]
        elif typing.get_origin(candidate) is tuple:
            items = _describe(typing.get_args(candidate)[0]).split(" ", 1)[-1]
            options.append(f"a comma-separated list of {items}s")
        else:
            options.append(NAMED.get(candidate, f"a {getattr(candidate, '__name__', candidate)}"))
    return " or ".join(options)
