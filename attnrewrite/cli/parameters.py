"""Dataclasses as parameters of a command: each field is an option, and the command is called with the dataclass."""

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from attnrewrite.cli.options import PANELS
from attnrewrite.request import Option


def flattened(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with a parameter for each field of the dataclasses that it takes."""
    hints = get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in groups:
            parameters += _options_of(groups[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    def flat(**values: Any) -> Any:
        built = {name: _built(group, values) for name, group in groups.items()}
        return function(**values, **built)

    flat.__name__, flat.__doc__ = function.__name__, function.__doc__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _options_of(group: Any) -> Iterator[inspect.Parameter]:
    """A parameter for each field of a dataclass that is an option: annotated here, or with an `Option` of a record's.

    A field that is a dataclass itself gives its own fields; one that is neither keeps its default.
    """
    types = get_type_hints(group, include_extras=True)
    for each in fields(group):
        hint, of_record = types[each.name], each.metadata.get("option")
        if is_dataclass(hint):
            yield from _options_of(hint)
        elif of_record is not None:
            default = each.default or None if of_record.type else each.default
            name = of_record.name or each.name
            yield _parameter(name, default, of_record.type or hint, _typer_option(of_record), PANELS.get(group))
        elif get_origin(hint) is Annotated:
            default = inspect.Parameter.empty if each.default is MISSING else each.default
            kind, option = get_args(hint)
            yield _parameter(each.name, default, kind, option, PANELS.get(group))


def _typer_option(option: Option) -> Any:
    return typer.Option(
        *([option.flag] if option.flag else []),
        help=option.help,
        metavar=option.metavar,
        min=option.min,
        show_default=option.show_default,
    )


def _parameter(name: str, default: Any, kind: Any, option: Any, panel: str | None) -> inspect.Parameter:
    """An option of the command line of type `kind`, in a `panel` of --help."""
    listed = copy.copy(option)
    listed.rich_help_panel = panel
    annotation = Annotated[kind, listed]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _built(group: Any, values: dict[str, Any]) -> Any:
    """The dataclass of the options in `values`, which are taken out."""
    types = get_type_hints(group, include_extras=True)
    given = {}
    for each in fields(group):
        option = each.metadata.get("option")
        name = option.name or each.name if option else each.name
        if is_dataclass(types[each.name]):
            given[each.name] = _built(types[each.name], values)
        elif name in values:
            given[each.name] = values.pop(name)
    return group(**given)
