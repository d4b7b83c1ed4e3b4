"""The gateway's goals beside what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from bench.tools.goals import GOALS, Goal, goals_table, medians

CPU, RATE, STALL = (
    next(each for each in GOALS if each.title.startswith(title))
    for title in ("CPU ms of a JSON", "requests/s", "longest")
)


@pytest.mark.parametrize(
    ("goal", "mine", "peers", "verdict"),
    [
        (CPU, 0.30, 0.15, "met"),
        (CPU, 0.31, 0.15, "not met"),
        (CPU, 0.25, None, "met"),
        (CPU, 0.26, None, "not met"),
        (RATE, 4000.0, 8000.0, "met"),
        (RATE, 3999.0, 7000.0, "not met"),
        (RATE, 4100.0, 8400.0, "not met"),
        (STALL, 20.0, None, "met"),
        (STALL, None, 1.0, "not measured"),
        (Goal("x", "y", times=2.0), 1.0, None, "no peer"),
    ],
)
def test_a_goal_is_met_by_ratio_and_bound(
    goal: Goal, mine: float | None, peers: float | None, verdict: str
) -> None:
    assert goal.verdict(mine, peers) == verdict


def side(cpu_ms: float, p50_ms: float) -> dict[str, Any]:
    latency = {"latency_ms": {"p50": p50_ms, "p99": p50_ms}}
    return {"whole": {"cpu_ms": {"serving": cpu_ms}, "opened": latency}}


def test_the_table_has_a_line_for_each_goal_and_what_is_added_to_the_upstream() -> None:
    result = {
        "straight": side(0.0, 0.5),
        "bare": side(0.05, 0.6),
        "smg": side(0.2, 1.5),
        "gateway": {**side(0.3, 2.5), "counts": {"syscalls": 7.5}},
    }
    head, *lines = goals_table(result, {"smg": "SMG"}).splitlines()
    assert [line[:28].strip() for line in lines[: len(GOALS)]] == [each.title for each in GOALS]
    rows = {line[:28].strip(): line[52:].split() for line in lines}
    assert head.split()[:4] == ["goal", "SMG", "us", "floor"]
    assert rows[CPU.title] == ["0.200", "0.300", "0.050", "1.50", "met"]
    assert rows["added p50 ms at 20/s"] == ["1.000", "2.000", "0.100", "2.00", "not", "met"]
    assert rows["system calls a request"] == ["-", "7.500", "-"]


def test_rounds_become_their_medians() -> None:
    rounds = [{"a": {"b": each}, "name": "x", "cores": [0]} for each in (3.0, 1.0, 2.0)]
    assert medians(rounds) == {"a": {"b": 2.0}, "name": "x", "cores": [0]}
