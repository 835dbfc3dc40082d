"""One case: a damaged file laid out in an empty folder, a command on it, and the verdict on how that ends."""

import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fuzz.limits import Limits, confined
from fuzz.seeds import Seeds
from fuzz.subjects import SUBJECTS, Right

OUTCOMES = {0: "went through", 2: "refused", 3: "nothing matched", 4: "check failed"}
SOUND = tuple(OUTCOMES.values())


@dataclass(frozen=True)
class Verdict:
    """`outcome` is one of SOUND or "wrong"; `told` is the message, or what is wrong."""

    kind: str
    number: int
    outcome: str
    line: str
    told: str


@dataclass(frozen=True)
class Judge:
    """Tries cases: the same for a kind, a number and a seed. `original` is what the converted seed was made from."""

    seeds: Seeds
    original: Any
    limits: Limits = field(default_factory=Limits)

    def __call__(self, case: tuple[str, int, int]) -> Verdict:
        kind, number, seed = case
        random = Random(f"{kind} {number} {seed}")
        subject = SUBJECTS[kind]
        line, files = subject.damaged(self.seeds, random)
        with self._laid_out(files) as folder:
            outcome, _, told = confined(lambda: self._tried(folder, line, subject.right), self.limits).partition(": ")
        return Verdict(kind, number, outcome if outcome in SOUND else "wrong", line, told.strip() or outcome)

    def rehearse(self, kind: str) -> None:
        """Every command line of a kind on sound files, in this process. AssertionError where one fails."""
        subject, here = SUBJECTS[kind], Path.cwd()
        seen: set[str] = set()
        for sound in subject.sets(self.seeds):
            for line in sound.lines.keys() - seen:
                with self._laid_out(sound.files) as folder:
                    os.chdir(folder)
                    outcome = self._judged(line, subject.right)
                    os.chdir(here)
                assert outcome in (OUTCOMES[0], OUTCOMES[3]), f"{line} on sound files: {outcome}"
            seen |= sound.lines.keys()

    @contextmanager
    def _laid_out(self, files: Mapping[str, bytes]) -> Iterator[Path]:
        beside = {"pictures/good.png": self.seeds.pictures["a.png"]}
        with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
            for name, content in {**self.seeds.beside, **beside, **files}.items():
                path = Path(folder) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            yield Path(folder)

    def _tried(self, folder: Path, line: str, right: Right) -> str:
        os.chdir(folder)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        return self._judged(line, right)

    def _judged(self, line: str, right: Right) -> str:
        """How a command ends in the working folder: one of SOUND, or what is wrong; what it said follows a colon."""
        before = _listing()
        if line.split()[0] in ("plan", "sites"):
            return self._in_python(line)
        with _kept("out.txt", "err.txt") as streams:
            from attnrewrite.cli.main import main

            code = main([*line.split(), "--json"])
            for stream in streams:
                stream.flush()
        printed, errors = (Path(name).read_text(errors="replace") for name in ("out.txt", "err.txt"))
        if code not in OUTCOMES:
            return f"wrong: exit code {code}: {errors.strip()[-400:]}"
        said = json.loads(printed)
        lines = [each for each in errors.splitlines() if not each.startswith("note: ")]
        if code == 0:
            right(line, said)
            return OUTCOMES[0]
        if code == 3:
            return OUTCOMES[3]
        assert len(lines) == 1, f"{len(lines)} lines on standard error: {lines[:3]}"
        assert list(said) == ["error"], f"printed beside the error: {list(said)}"
        assert (left := _listing() - before) == set(), f"left behind: {sorted(left)[:3]}"
        return f"{OUTCOMES[code]}: {said['error']['message']}"

    def _in_python(self, line: str) -> str:
        """What Python's users do with a converted folder: the plan applied, its sites listed."""
        from attnrewrite import api
        from attnrewrite.errors import AttnRewriteError
        from attnrewrite.frontends.sources import load_source
        from attnrewrite.passes.fx.rewrite import FxRewrite
        from attnrewrite.plan import Plan

        folder = Path(line.split()[1])
        try:
            if line.startswith("plan"):
                module = FxRewrite(Plan.load(folder))(self.original.module)
                module(*self.original.example_inputs)
            else:
                json.dumps(api.sites_of(str(folder), load_source(str(folder))), allow_nan=False)
        except AttnRewriteError as error:
            return f"{OUTCOMES[error.exit_code]}: {error}"
        return OUTCOMES[0]


def _listing() -> set[str]:
    skipped = ("__pycache__", "out.txt", "err.txt")
    return {str(path) for path in Path().rglob("*") if not set(path.parts) & set(skipped)}


@contextmanager
def _kept(out: str, err: str) -> Iterator[tuple[io.TextIOWrapper, ...]]:
    """Standard output and error, of compiled code as well, in files of these names."""
    own, kept = (sys.stdout, sys.stderr), [os.dup(1), os.dup(2)]
    streams = []
    for name, number in ((out, 1), (err, 2)):
        with open(name, "wb") as file:
            os.dup2(file.fileno(), number)
        streams.append(io.TextIOWrapper(os.fdopen(os.dup(number), "wb"), encoding="utf-8", errors="backslashreplace"))
    sys.stdout, sys.stderr = streams
    try:
        yield tuple(streams)
    finally:
        sys.stdout, sys.stderr = own
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        for stream in streams:
            stream.close()
