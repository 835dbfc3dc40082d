"""The command line: runs a command and turns whatever goes wrong into one line and an exit code."""

import contextlib
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer

from attnrewrite.cli import commands
from attnrewrite.cli.output import Failure, Notes, say
from attnrewrite.errors import AttnRewriteError

# Newer releases of typer carry their own copy of click: this is the class that the one in use raises.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
DEBUG = "ATTNREWRITE_DEBUG"


class Terminated(KeyboardInterrupt):
    """SIGTERM came: unfinished output is removed, as it is for Ctrl-C."""


def _terminate(*_: object) -> None:
    raise Terminated


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. Errors are one line on standard error, and with --json an object
    {"error": {"code", "message", "site"}} on standard output.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    before = signal.signal(signal.SIGTERM, _terminate)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # they are for whoever writes Python
    notes = Notes()
    logging.getLogger("attnrewrite").addHandler(notes)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(given, as_json="--json" in given)
    finally:
        logging.getLogger("attnrewrite").removeHandler(notes)
        signal.signal(signal.SIGTERM, before)


def _run(arguments: list[str], *, as_json: bool) -> int:
    command = typer.main.get_command(commands.app)
    try:
        if "_ATTNREWRITE_COMPLETE" in os.environ:  # a shell asks for completions
            return command.main(arguments, prog_name="attnrewrite")
        with command.make_context("attnrewrite", arguments) as context:
            return command.invoke(context) or 0
    except typer.Exit as finished:
        return finished.exit_code
    except AttnRewriteError as error:
        return _failed("error: ", Failure(error.code, str(error), error.site), error.exit_code, as_json=as_json)
    except UsageError as error:
        return _failed("error: ", Failure("bad-usage", _usage(error)), 2, as_json=as_json)
    except KeyboardInterrupt as stopped:
        code = 143 if isinstance(stopped, Terminated) else 130
        return _failed("", Failure("stopped", "stopped"), code, as_json=as_json)
    except BrokenPipeError:  # the reader of our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        failure = Failure("unexpected", f"{text} ({DEBUG}=1 shows where)")
        return _failed("unexpected error: ", failure, 1, as_json=as_json)


def _failed(prefix: str, failure: Failure, exit_code: int, *, as_json: bool) -> int:
    if os.environ.get(DEBUG):
        traceback.print_exc()
    say(f"attnrewrite: {prefix}{failure.message}")
    if as_json and os.environ.get("RANK", "0") == "0":  # of the processes that torchrun started, the first one prints
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"error": asdict(failure)}, indent=2), flush=True)
    return exit_code


def _usage(error: Any) -> str:
    """A usage error of click's, in one line with the way to help."""
    name = error.ctx.command_path if error.ctx else "attnrewrite"
    close = getattr(error, "possibilities", None)
    message = (error.message if close else error.format_message()).rstrip(".")
    hint = f". Did you mean {' or '.join(close)}?" if close else ""
    return f"{message}{hint} (see {name} --help)"
