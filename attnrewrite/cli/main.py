"""The command line: runs a command and turns whatever goes wrong into one line and an exit code."""

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
from attnrewrite.cli.config import JSON
from attnrewrite.cli.output import Failure, Notes, say
from attnrewrite.errors import AttnRewriteError, first_line

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
    _open_streams()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    before = signal.signal(signal.SIGTERM, _terminate)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # they are for whoever writes Python
    notes = Notes()
    logging.getLogger("attnrewrite").addHandler(notes)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(given)
    finally:
        logging.getLogger("attnrewrite").removeHandler(notes)
        signal.signal(signal.SIGTERM, before)


def _open_streams() -> None:
    """Lead standard streams that are closed nowhere: the next file that is opened would take their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115, as long as the process


def _run(arguments: list[str]) -> int:
    """Run a command line. Its --json may stand in the file that --config names, which is read on the way."""
    command = typer.main.get_command(commands.app)
    wants_json = {JSON: "--json" in arguments}
    try:
        if "_ATTNREWRITE_COMPLETE" in os.environ:  # a shell asks for completions
            return command.main(arguments, prog_name="attnrewrite")
        with command.make_context("attnrewrite", arguments) as context:
            context.meta.update(wants_json)
            wants_json = context.meta  # which the command's own context shares
            return command.invoke(context) or 0
    except typer.Exit as finished:
        return finished.exit_code
    except BrokenPipeError:  # the reader of our output has had enough
        _leave_output()
        return 141
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get(DEBUG):
            traceback.print_exc()
        return _failed(*_failure(error), as_json=wants_json[JSON])


def _failure(error: BaseException) -> tuple[str, Failure, int]:
    """What is said before the message, the failure, and the exit code."""
    if isinstance(error, AttnRewriteError):
        return "error: ", Failure(error.code, str(error), error.site), error.exit_code
    if isinstance(error, UsageError):
        return "error: ", Failure("bad-usage", _usage(error)), 2
    if isinstance(error, KeyboardInterrupt):
        return "", Failure("stopped", "stopped"), 143 if isinstance(error, Terminated) else 130
    told = f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__
    return "unexpected error: ", Failure("unexpected", f"{told} ({DEBUG}=1 shows where)"), 1


def _failed(prefix: str, failure: Failure, exit_code: int, *, as_json: bool) -> int:
    say(f"attnrewrite: {prefix}{failure.message}")
    if as_json and os.environ.get("RANK", "0") == "0":  # of the processes that torchrun started, the first one prints
        try:
            print(json.dumps({"error": asdict(failure)}, indent=2), flush=True)
        except OSError:  # nobody reads it
            _leave_output()
    return exit_code


def _leave_output() -> None:
    """Let what could not be written to standard output go, so that Python does not try again as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _usage(error: Any) -> str:
    """A usage error of click's, in one line with the way to help."""
    name = error.ctx.command_path if error.ctx else "attnrewrite"
    close = getattr(error, "possibilities", None)
    message = (error.message if close else error.format_message()).rstrip(".")
    hint = f". Did you mean {' or '.join(close)}?" if close else ""
    return f"{message}{hint} (see {name} --help)"
