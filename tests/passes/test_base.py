"""The contract of a pass, and what a pipeline tells of the passes that it runs. Graphs here are tuples of words."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import attnrewrite.passes
from attnrewrite.errors import CheckFailedError, InputError, Refusal
from attnrewrite.passes.base import Edit, Pass, PassFailedError, PassResult, Pipeline, Stage, as_text

Words = tuple[str, ...]


@dataclass(frozen=True)
class ReplaceWord(Pass[Words]):
    """`old` by `new` wherever it stands; `new` may not stand there before, nor `old` after."""

    old: str
    new: str

    def requires(self, graph: Words) -> Refusal | None:
        return Refusal("taken", f"has {self.new!r} already") if self.new in graph else None

    def rewrite(self, graph: Words) -> PassResult[Words]:
        edits = tuple(Edit(word, self.new) for word in graph if word == self.old)
        return PassResult(tuple(self.new if word == self.old else word for word in graph), edits)


@dataclass(frozen=True)
class DropFirst(Pass[Words]):
    """The first word goes; some must be left."""

    def rewrite(self, graph: Words) -> PassResult[Words]:
        return PassResult(graph[1:], (Edit(graph[0]),))

    def ensures(self, before: Words, result: PassResult[Words]) -> Refusal | None:
        return None if result.graph else Refusal("empty", f"is empty, of {len(before)} words before")


@dataclass(frozen=True)
class Stumble(Pass[Words]):
    """Raises what no pass of ours raises."""

    def rewrite(self, graph: Words) -> PassResult[Words]:
        raise KeyError("shoe")


A_TO_B = ReplaceWord("a", "b")


def test_a_result_is_a_graph_and_its_edits() -> None:
    graph, edits = result = A_TO_B.apply(("a", "c", "a"))
    assert graph == A_TO_B(("a", "c", "a")) == ("b", "c", "b")
    assert edits == (Edit("a", "b"), Edit("a", "b"))
    assert result.modified


def test_nothing_changed_is_not_modified() -> None:
    assert A_TO_B.apply(("c",)) == PassResult(("c",))
    assert not A_TO_B.apply(("c",)).modified
    assert not Pipeline((A_TO_B, ReplaceWord("d", "e"))).apply(("c",)).modified


def test_passes_are_values_named_after_their_class() -> None:
    assert A_TO_B == ReplaceWord("a", "b") != ReplaceWord("a", "c")
    assert (A_TO_B.name, Pipeline((A_TO_B,)).name, Pipeline((), name="tidy").name) == (
        "replace-word",
        "pipeline",
        "tidy",
    )


def test_a_graph_without_what_is_required_is_refused_before_it_is_touched() -> None:
    assert A_TO_B.requires(("a", "b")) == Refusal("taken", "has 'b' already")
    with pytest.raises(InputError, match=r"^replace-word cannot be applied: the graph has 'b' already$"):
        A_TO_B(("a", "b"))


def test_a_result_that_is_not_what_is_ensured_is_refused() -> None:
    with pytest.raises(CheckFailedError, match=r"^drop-first failed: the result is empty, of 1 words before$"):
        DropFirst()(("a",))


FAILURES: dict[str, tuple[Pass[Words], type[Exception], str]] = {
    "required": (ReplaceWord("d", "c"), InputError, "replace-word cannot be applied: the graph has 'c' already"),
    "ensured": (Pipeline((DropFirst(), DropFirst())), CheckFailedError, "drop-first failed: the result is empty"),
    "foreign": (Stumble(), PassFailedError, "stumble failed: KeyError: 'shoe'"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_pipeline_names_the_pass_that_failed_and_those_before(failure: str) -> None:
    failing, kind, message = FAILURES[failure]
    with pytest.raises(kind) as told:
        Pipeline((A_TO_B, ReplaceWord("b", "x"), failing, DropFirst()), name="words")(("a", "c"))
    assert type(told.value) is kind
    assert str(told.value).startswith(message)
    assert str(told.value).endswith(f"(pass {failing.name} of words, after replace-word, replace-word)")


def test_the_first_of_a_pipeline_comes_after_no_other() -> None:
    with pytest.raises(PassFailedError, match=r"\(pass stumble of pipeline, after no other\)"):
        Pipeline((Stumble(), A_TO_B))(("a",))


def test_between_passes_the_callback_is_told_of_each_in_order() -> None:
    stages: list[Stage[Words]] = []
    result = Pipeline((A_TO_B, DropFirst()), stages.append, name="words").apply(("a", "c"))
    assert [(s.pipeline, s.number, s.ran, s.before, s.result.graph) for s in stages] == [
        ("words", 0, A_TO_B, ("a", "c"), ("b", "c")),
        ("words", 1, DropFirst(), ("b", "c"), ("c",)),
    ]
    assert all(stage.seconds >= 0 for stage in stages)
    assert result == PassResult(("c",), (Edit("a", "b"), Edit("b")))


def test_a_callback_that_finds_fault_stops_the_pipeline() -> None:
    def verify(stage: Stage[Words]) -> None:
        if "c" not in stage.result.graph:
            raise CheckFailedError("c is gone")

    with pytest.raises(CheckFailedError, match=r"c is gone \(pass drop-first of pipeline, after replace-word\)"):
        Pipeline((A_TO_B, DropFirst(), A_TO_B), verify)(("c", "d"))


def test_pipelines_nest() -> None:
    inner = Pipeline((A_TO_B, ReplaceWord("b", "c")), name="inner")
    assert Pipeline((inner, DropFirst()))(("a", "a")) == ("c",)


def test_every_stage_is_dumped_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREWRITE_DUMP", str(tmp_path / "dump"))
    for _ in range(2):
        Pipeline((A_TO_B, DropFirst()), name="words")(("a", "c"))
    written = {path.name: path.read_text() for path in sorted((tmp_path / "dump").iterdir())}
    assert written == {
        "000-words-given.txt": "('a', 'c')\n",
        "001-words-replace-word.txt": "('b', 'c')\n",
        "002-words-drop-first.txt": "('c',)\n",
        "003-words-given.txt": "('a', 'c')\n",
        "004-words-replace-word.txt": "('b', 'c')\n",
        "005-words-drop-first.txt": "('c',)\n",
    }


def test_a_dump_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTNREWRITE_DUMP", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"^ATTNREWRITE_DUMP=.*file: cannot be written .*; name a folder$"):
        Pipeline((A_TO_B,))(("a",))


def test_graphs_of_modules_and_programs_are_dumped_with_their_operations() -> None:
    program = torch.export.export(nn.Linear(3, 2), (torch.randn(4, 3),))
    for graph in (program, program.module()):
        assert "torch.ops.aten.linear.default" in as_text(graph)
        assert "[4, 3]" in as_text(graph)


@pytest.mark.parametrize("name", attnrewrite.passes.__all__)
def test_what_the_package_offers_is_there(name: str) -> None:
    assert getattr(attnrewrite.passes, name).__name__ == name


def test_the_package_offers_nothing_else() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'rewritten'"):
        attnrewrite.passes.rewritten  # noqa: B018


def test_the_package_loads_nothing_until_asked() -> None:
    code = "import sys, attnrewrite.passes; print(*(n for n in sys.modules if n.startswith('attnrewrite.passes')))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "attnrewrite.passes.fx.exported" not in printed
    assert "attnrewrite.passes.onnx" not in printed
