"""The latency protocol, on calls that record themselves instead of working."""

import gc
import itertools
import time

import pytest

from attnrewrite.errors import InputError
from attnrewrite.evaluation import latency


def recorder(log: list[str], *names: str) -> dict:
    return {name: lambda name=name: log.append(name) for name in names}


def test_candidates_take_turns_in_changing_order() -> None:
    log: list[str] = []
    latency.measure(recorder(log, "a", "b", "c"), warmup=0, repeats=20)
    # A turn is an untimed and a timed call.
    assert log[::2] == log[1::2]
    rounds = [tuple(log[start : start + 6 : 2]) for start in range(0, len(log), 6)]
    assert len(rounds) == 20
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 1


def test_the_order_is_the_seeds() -> None:
    logs: list[list[str]] = [[], [], []]
    for log, seed in zip(logs, (1, 1, 2), strict=True):
        latency.measure(recorder(log, "a", "b", "c"), warmup=0, repeats=8, seed=seed)
    assert logs[0] == logs[1] != logs[2]


def test_warm_up_comes_first_and_is_not_counted() -> None:
    log: list[str] = []
    result = latency.measure(recorder(log, "a"), warmup=4, repeats=3)
    assert len(log) == 4 + 2 * 3
    assert result["a"].runs == 3


def test_quantiles_are_of_the_timed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    # Timed calls last 1 ms, 2 ms, ... 11 ms by a clock that only the timed call moves on.
    ticks = itertools.chain([0.0], *([0.0, duration / 1000] for duration in range(1, 12)))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    found = latency.measure({"a": lambda: None}, warmup=0, repeats=11)["a"]
    assert (found.p50_ms, found.p90_ms, found.runs) == (pytest.approx(6), pytest.approx(10), 11)


def test_a_budget_ends_the_rounds_after_three_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    seen: list[tuple[int, int]] = []
    result = latency.measure(
        {"a": lambda: None},
        warmup=0,
        repeats=50,
        budget_s=0.5,
        progress=lambda done, planned: seen.append((done, planned)),
    )
    assert result["a"].runs == 3
    assert seen == [(1, 50), (2, 50), (3, 50)]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_off_meanwhile_and_as_it_was_after(enabled: bool) -> None:
    seen: list[bool] = []

    def call() -> None:
        seen.append(gc.isenabled())
        if len(seen) == 4:
            raise RuntimeError

    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError):
            latency.measure({"a": call}, warmup=0, repeats=5)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
    assert seen == [False] * 4


@pytest.mark.parametrize("counts", [{"warmup": -1}, {"repeats": 0}])
def test_impossible_counts_are_refused(counts: dict[str, int]) -> None:
    with pytest.raises(InputError, match="at least 0 and 1"):
        latency.measure({}, **counts)


def test_the_environment_says_what_a_latency_depends_on() -> None:
    found = latency.environment(threads=2)
    assert found["threads"] == 2
    assert found["processor"]
    assert found["versions"]["torch"]
    assert set(found["versions"]) == set(latency.PACKAGES)
    assert found["date"].endswith("+00:00")
