"""A command's options in a TOML file: --config reads them, --save-config writes them."""

import json
import tomllib
from pathlib import Path
from typing import Any

import typer

from attnrewrite.errors import InputError, first_line, unknown_name

JSON = "attnrewrite.json"  # where a context's meta says whether the command prints JSON, before its options are read
NOT_SAVED = ("config", "save_config", "dry_run", "help")


def read_config(context: typer.Context, config: Path | None) -> Path | None:
    """Make the file's values the command's defaults, before the other options are read."""
    if config is None or context.resilient_parsing:
        return config
    if config.is_char_device() or config.is_block_device():
        raise InputError(f"--config {config} is a device: give a file of options")
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
