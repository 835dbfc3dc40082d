"""Options that several commands share, and their TOML file.

A command takes a group of options as one dataclass; `flattened` turns the dataclass's fields into options.
"""

import inspect
import json
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from attnrewrite.errors import InputError, unknown_name

MODEL, RUN, BUDGET = "The model", "The run", "The budget of --variant auto"


def _read_config(context: typer.Context, config: Path | None) -> Path | None:
    """Make the file's values the command's defaults, before the other options are read."""
    if config is None or context.resilient_parsing:
        return config
    try:
        said = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read --config {config}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"--config {config} is not TOML: {error}") from error
    known = {name: parameter for name, parameter in _parameters(context).items() if name not in NOT_SAVED}
    values = {}
    for key, value in said.items():
        if (name := key.replace("-", "_")) not in known:
            raise unknown_name(f"option of {context.info_name} in {config}", key, [n.replace("_", "-") for n in known])
        values[name] = _as_given(value, many=bool(getattr(known[name], "multiple", False)) or known[name].nargs != 1)
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
        name.replace("_", "-"): _as_toml(context.params[name])
        for name in _parameters(context)
        if name not in NOT_SAVED and getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"
    }
    lines = [
        f"# attnrewrite {context.info_name} --config {path}",
        *(f"{key} = {value}" for key, value in given.items()),
    ]
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write --save-config {path}: {error.strerror}") from error


def _as_toml(value: Any) -> str:
    """JSON's booleans, numbers, strings and lists of them are TOML's too."""
    return json.dumps(value, default=str, ensure_ascii=False)


def _parameters(context: typer.Context) -> dict[str, Any]:
    return {parameter.name: parameter for parameter in context.command.params if parameter.name}


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
class BudgetOptions:
    """What `--variant auto` may spend, and on what."""

    max_drop: Annotated[
        float | None,
        typer.Option(
            metavar="POINTS",
            help="Replace what can be replaced for at most so many points of top-1 (of agreement with the original, "
            "where the images have no labels), promised with 95 % confidence.",
            rich_help_panel=BUDGET,
        ),
    ] = None
    max_latency: Annotated[
        float | None,
        typer.Option(
            metavar="RATIO",
            help="Come down to this part of the original's time (0.7) and change the output as little as possible.",
            rich_help_panel=BUDGET,
        ),
    ] = None
    target: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="TARGET",
            help="Where time is saved: measured, where this machine can, else estimated. See attnrewrite targets.",
            rich_help_panel=BUDGET,
        ),
    ] = None
    candidates: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="What to choose from: published (the five papers' forms), all, or a variant with its options "
            "(masked:heads=1); may be repeated. Softmax always is one.",
            show_default="all",
            rich_help_panel=BUDGET,
        ),
    ] = None


@dataclass(frozen=True)
class RunOptions:
    """How any command runs and what it prints."""

    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=RUN)
    ] = False
    seed: Annotated[int, typer.Option(help="Of everything that is drawn at random.", min=0, rich_help_panel=RUN)] = 0
    threads: Annotated[
        int | None, typer.Option(help="How many CPU threads to use.", min=1, rich_help_panel=RUN, show_default="all")
    ] = None
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
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=types[field.name],
            )
            for field in fields(groups[name])
        ]

    def flat(**values: Any) -> Any:
        grouped = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return function(**values, **grouped)

    flat.__name__, flat.__doc__ = function.__name__, function.__doc__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat
