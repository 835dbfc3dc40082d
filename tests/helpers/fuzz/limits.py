"""Work in a process of its own, forked from one that has imported everything, with bounded time, memory and files."""

import faulthandler
import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Seconds of the processor and, for what waits, of the clock; bytes beyond what is held, and of one file."""

    seconds: int = 60
    patience: int = 600
    memory: int = 3 << 30
    file: int = 1 << 30


def confined(work: Callable[[], str], limits: Limits = Limits()) -> str:
    """What `work` returns, or one line that begins with "died" and says what ended it: a signal, a limit, an exit."""
    with tempfile.TemporaryFile() as answer:
        child = os.fork()
        if child == 0:
            _answer(work, limits, answer.fileno())
        _, status = os.waitpid(child, 0)
        answer.seek(0)
        text = answer.read().decode()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        why = {signal.SIGALRM: "it hangs", signal.SIGXCPU: "it hangs", signal.SIGKILL: "it was killed"}
        return f"died: {why.get(number, 'it crashes')} ({signal.Signals(number).name})"
    return text or f"died: it leaves with {os.WEXITSTATUS(status)}"


def _answer(work: Callable[[], str], limits: Limits, to: int) -> None:
    """In the child: does the work, writes what came of it, and is gone without running what its parent has to run."""
    faulthandler.disable()  # the parent tells of a crash
    try:
        _confine(limits)
        text = work()
    except BaseException:
        text = "died: " + traceback.format_exc(limit=-8)
    try:
        os.write(to, text.encode(errors="replace"))
    finally:
        os._exit(0)


def _confine(limits: Limits) -> None:
    with open("/proc/self/statm") as held:
        pages = int(held.read().split()[0])
    most = pages * resource.getpagesize() + limits.memory
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file, limits.file))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds + 5))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(limits.patience)
