"""Options that several commands share, and their TOML file.

A command takes a group of options as one dataclass, the records of attnrewrite.request among them; `flattened` turns
the dataclass's fields into options.
"""

import inspect
import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from attnrewrite.errors import InputError, first_line, unknown_name
from attnrewrite.request import Budget, Execution, Option

MODEL, RUN = "The model", "The run"
JSON = "attnrewrite.json"  # where a context's meta says whether the command prints JSON, before its options are read
PANELS = {Execution: RUN, Budget: "The budget of --variant auto"}

SourceName = Annotated[
    str, typer.Argument(metavar="SOURCE", help="The model: see attnrewrite --help.", show_default=False)
]
Original = Annotated[
    str | None,
    typer.Option(
        metavar="file.py:factory",
        help="What a converted folder is held against, where its own report is not to be asked; with --checkpoint.",
        rich_help_panel=MODEL,
    ),
]
Cpu = Annotated[
    str | None,
    typer.Option(metavar="CORE", help="The core to build for, for arm-cpu.", show_default="cortex-a76"),
]
Precision = Annotated[
    str | None,
    typer.Option(
        metavar="fp32|fp16|int8", help="What products are computed in, for host and arm-cpu.", show_default="fp32"
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out damaged image files, and name them.")]


def _read_config(context: typer.Context, config: Path | None) -> Path | None:
    """Make the file's values the command's defaults, before the other options are read."""
    if config is None or context.resilient_parsing:
        return config
    try:
        said = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read --config {config}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"--config {config} is not TOML: {first_line(error)}") from error
    context.meta[JSON] = context.meta.get(JSON, False) or said.get("json") in (True, "true")
    parameters = _parameters(context)
    in_python = {parameter.name.replace("_", "-"): parameter for parameter in parameters.values()}  # as saved by 0.1.0
    known = in_python | parameters
    values = {}
    for key, value in said.items():
        parameter = known.get(key.replace("_", "-"))
        if parameter is None:
            raise unknown_name(f"option of {context.info_name} in {config}", key, list(parameters))
        many = bool(getattr(parameter, "multiple", False)) or parameter.nargs != 1
        values[parameter.name] = _as_given(value, many=many)
    context.default_map = values
    return config


def _as_given(value: Any, *, many: bool) -> Any:
    """A TOML value as the command line would have it: 'a,b' for a list, ['key=value'] for a table."""
    if isinstance(value, dict):
        return [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, list):
        return [str(item) for item in value] if many else ",".join(map(str, value))
    return [str(value)] if many else value if isinstance(value, bool) else str(value)


def save_config(context: typer.Context, path: Path) -> None:
    """Write the options that were given, on the command line or by --config, to a TOML file that --config reads."""
    given = {
        name: _as_toml(context.params[parameter.name])
        for name, parameter in _parameters(context).items()
        if getattr(context.get_parameter_source(parameter.name), "name", "DEFAULT") != "DEFAULT"
    }
    lines = [
        f"# attnrewrite {context.info_name} --config {path}",
        *(f"{key} = {value}" for key, value in given.items()),
    ]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except (OSError, UnicodeEncodeError) as error:
        reason = getattr(error, "strerror", None) or "an option holds what is no character"
        raise InputError(f"cannot write --save-config {path}: {reason}") from error


def _as_toml(value: Any) -> str:
    """JSON's booleans, numbers, strings and lists of them are TOML's too."""
    return json.dumps(value, default=str, ensure_ascii=False)


def _parameters(context: typer.Context) -> dict[str, Any]:
    """What a file may hold, by its name on the command line."""
    parameters = [each for each in context.command.params if each.name and each.name not in NOT_SAVED]
    return {max(each.opts, key=len).removeprefix("--").replace("_", "-"): each for each in parameters}


@dataclass(frozen=True)
class ModelOptions:
    """How a model is loaded: the keyword arguments of `load_source`."""

    checkpoint: Annotated[
        str | None,
        typer.Option(help="Weights: a .safetensors, .pth, .pt or .bin file, or 'pretrained'.", rich_help_panel=MODEL),
    ] = None
    input_size: Annotated[str | None, typer.Option(help="Such as 3x224x224.", rich_help_panel=MODEL)] = None
    mean: Annotated[
        str | None, typer.Option(help="Of the pixels in 0..1: one number or 0.5,0.5,0.5.", rich_help_panel=MODEL)
    ] = None
    std: Annotated[str | None, typer.Option(help="Likewise.", rich_help_panel=MODEL)] = None


@dataclass(frozen=True)
class VariantOptions:
    """What is put in, and where nothing is."""

    variant: Annotated[
        str,
        typer.Option(help="The attention to put in: see attnrewrite variants; or auto: the right one at each site."),
    ] = "l1"
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the variant; may be repeated.")
    ] = None
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="SITE", help="A site to leave as it is, or a pattern (decoder.*); may be repeated."),
    ] = None
    keep_bad: Annotated[
        bool, typer.Option("--keep-bad", help="Leave a site whose check fails as it is, instead of stopping.")
    ] = False


@dataclass(frozen=True)
class OutputOptions:
    """The folder that a command writes."""

    out: Annotated[Path, typer.Option(help="A folder to write, which must not exist yet.", show_default=False)]
    force: Annotated[bool, typer.Option("--force", help="Replace the output folder, where attnrewrite wrote it.")] = (
        False
    )


@dataclass(frozen=True)
class RunOptions:
    """How any command runs and what it prints."""

    execution: Execution = field(default_factory=Execution)
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=RUN)
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, say what would be done, write nothing.", rich_help_panel=RUN),
    ] = False
    config: Annotated[
        Path | None,
        typer.Option(
            help="Take options from a TOML file; those on the command line win.",
            is_eager=True,
            callback=_read_config,
            rich_help_panel=RUN,
        ),
    ] = None
    save_config: Annotated[
        Path | None, typer.Option(help="Write this command's options to such a file.", rich_help_panel=RUN)
    ] = None


NOT_SAVED = ("config", "save_config", "dry_run", "help")


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
        hint, spelled = types[each.name], each.metadata.get("option")
        if is_dataclass(hint):
            yield from _options_of(hint)
        elif spelled is not None:
            yield _option_of(each, hint, spelled, PANELS.get(group))
        elif get_origin(hint) is Annotated:
            default = inspect.Parameter.empty if each.default is MISSING else each.default
            yield inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _option_of(each: "Field[Any]", hint: Any, spelled: Option, panel: str | None) -> inspect.Parameter:
    """The parameter of a record's field."""
    made = typer.Option(
        *([spelled.flag] if spelled.flag else []),
        help=spelled.help,
        metavar=spelled.metavar,
        min=spelled.min,
        show_default=spelled.show_default,
        rich_help_panel=panel,
    )
    return inspect.Parameter(
        spelled.name or each.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=each.default or None if spelled.type else each.default,
        annotation=Annotated[spelled.type or hint, made],
    )


def _built(group: Any, values: dict[str, Any]) -> Any:
    """The dataclass of the options in `values`, which are taken out."""
    types = get_type_hints(group, include_extras=True)
    given = {}
    for each in fields(group):
        spelled = each.metadata.get("option")
        name = spelled.name or each.name if spelled else each.name
        if is_dataclass(types[each.name]):
            given[each.name] = _built(types[each.name], values)
        elif name in values:
            given[each.name] = values.pop(name)
    return group(**given)
