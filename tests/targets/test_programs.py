"""Other programs that take too long: nothing of them is left running."""

import fcntl
import sys
import time
from pathlib import Path

import pytest

from attnrewrite.targets.runners import programs

# A program whose own child holds a lock, and outlives it.
CHILD = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True)"
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD + "; time.sleep(60)"!r}, sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[1] + ".held", "w").close()
child.wait()
"""
PATIENCE_S = 20  # until the system has ended what was killed


def test_what_a_program_started_ends_with_it(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with pytest.raises(programs.Unavailable, match="took more than"):
        programs.run([sys.executable, "-c", PARENT, str(lock)], 5)
    assert (tmp_path / "lock.held").exists()
    with lock.open("w") as file:
        for _ in range(10 * PATIENCE_S):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        else:
            pytest.fail("the program's child still holds its lock")
