"""One family of errors, and refusals as values. Messages name the node or file, what is wrong, and the way out."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass


class AttnRewriteError(Exception):
    """Anything attnrewrite refuses to do. `exit_code` is what the command line returns for it, `code` what it is called
    for programs.
    """

    exit_code = 2
    code = "refused"

    @property
    def site(self) -> str | None:
        """The id of the site that the message is about; None where it names none, or several."""
        named = set(re.findall(r"\bsite\d+\b", str(self)))
        return named.pop() if len(named) == 1 else None


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

    `code` is one word or several joined by hyphens, for programs; `sentence` completes "it ..." for people.
    """

    code: str
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of an error's text that says something, `most` characters at most; without one, its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:most] if lines else type(error).__name__


def unknown_name(what: str, name: str, known: Iterable[str]) -> InputError:
    """An error for a name that is not known, suggesting the nearest one that is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    listed = ", ".join(known[:20]) + (f" and {len(known) - 20} more" if len(known) > 20 else "")
    return InputError(f"unknown {what} {name!r}: {hint}known are {listed or 'none'}")
