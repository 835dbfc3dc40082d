"""One family of errors, and refusals as values. Messages name the node or file, what is wrong, and the way out."""

import difflib
import numbers
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class AttnRewriteError(Exception):
    """Anything attnrewrite refuses to do. `exit_code` is what the command line returns for it, `code` what it is called
    for programs, `site` the id of the one site that the message is about, if it is about one. The message is one line,
    whatever names are in it.
    """

    exit_code = 2
    code = "refused"

    def __init__(self, message: str, *, site: str | None = None) -> None:
        super().__init__(" ".join(message.split()) if "\n" in message else message)
        self.site = site


class InputError(AttnRewriteError):
    """The source, the checkpoint, the data or an option is not usable as given."""

    code = "bad-input"


class NothingMatchedError(AttnRewriteError):
    """The model holds no attention that can be rewritten."""

    exit_code = 3
    code = "nothing-matched"


class CheckFailedError(AttnRewriteError):
    """A result did not agree with its reference: nothing was emitted."""

    exit_code = 4
    code = "check-failed"


@dataclass(frozen=True)
class Refusal:
    """Why something cannot be done: a value where a function answers "may I". None, or what was asked for, is a yes.

    `code` is one word or several joined by hyphens, for programs; `sentence` completes "it ..." for people; `site` is
    the id of the one site that it is about, where who reads it could not know.
    """

    code: str
    sentence: str
    site: str | None = field(default=None, kw_only=True)

    def __str__(self) -> str:
        return self.sentence


def required(what: str, value: Any, kind: type) -> Any:
    """`value`, which is to be of `kind`. Raises InputError where it is not."""
    if not isinstance(value, kind):
        raise InputError(f"{what}: {short(value)} is no {kind.__name__}")
    return value


def refuse_given(why: str, **given: Any) -> None:
    """Raise InputError where any of `given` is not None, as `why` says that it would not be heeded."""
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise InputError(f"{why}: leave out {', '.join(named)}")


def short(value: object, most: int = 80) -> str:
    """A value as Python writes it, in one line of `most` characters at most."""
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[:most]}..."


def whole_number(what: str, value: Any, least: int, most: int) -> int:
    """`value`, which is to be an integer from `least` to `most`. Raises InputError where it is not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InputError(f"{what} {short(value)} is no whole number")
    if not least <= int(value) <= most:
        raise InputError(f"{what} {value} must lie between {least} and {most}")
    return int(value)


def told(who: str, error: Exception, *, site: str | None = None) -> AttnRewriteError:
    """What `who` raised, as an error of ours: its own, or that it failed and how."""
    if isinstance(error, AttnRewriteError):
        return error
    return CheckFailedError(f"{who} failed: {type(error).__name__}: {first_line(error)}", site=site)


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of an error's text that says something, `most` characters at most; without one, its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:most] if lines else type(error).__name__


def unknown_name(what: str, name: object, known: Iterable[str]) -> InputError:
    """An error for a name that is not known, suggesting the nearest one that is."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    listed = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
    return InputError(f"unknown {what} {name!r}: {hint}known are {listed or 'none'}")
