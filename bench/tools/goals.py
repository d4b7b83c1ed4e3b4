"""Shows what was measured of the gateway beside its goals: each a ratio to the fastest peer of the
same run, a figure of its own, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

Value = float | None
PEER = "smg"
"""The peer that goals are ratios to."""


class Goal(NamedTuple):
    """A row. `path`: to the figure in a side's result. `times`: of the peer's; `bound`: of its own,
    in any case or, with `stands_in`, where the peer was not measured. `is_least`: more is better.
    `added`: to what a request straight to the upstream takes."""

    title: str
    path: str
    times: float | None = None
    bound: float | None = None
    stands_in: bool = False
    is_least: bool = False
    added: bool = False

    @property
    def written(self) -> str:
        sign = ">=" if self.is_least else "<="
        parts = [] if self.times is None else [f"{sign} {self.times:g}x SMG's"]
        if self.bound is not None:
            parts.append(f"({self.bound:,g})" if self.stands_in else f"{sign} {self.bound:,g}")
        return "; ".join(parts).replace("; (", " (")

    def verdict(self, mine: Value, peers: Value) -> str:
        if mine is None:
            return "not measured"
        limits = [] if self.times is None or peers is None else [self.times * peers]
        if self.bound is not None and not (self.stands_in and limits):
            limits.append(self.bound)
        if not limits:
            return "no peer"
        kept = all(mine >= each if self.is_least else mine <= each for each in limits)
        return "met" if kept else "not met"


GOALS = (
    Goal("CPU ms of a JSON request", "whole.cpu_ms.serving", 2.0, 0.25, stands_in=True),
    Goal("requests/s, one core", "whole.closed.requests_per_s", 0.5, 4000, is_least=True),
    Goal("stream events/s", "each.closed.events_per_s", 1.3, is_least=True),
    Goal("CPU ms of a stream of 64", "each.cpu_ms.serving", 0.75),
    Goal("added p50 ms at 20/s", "whole.opened.latency_ms.p50", 1.7, added=True),
    Goal("added p99 ms at 20/s", "whole.opened.latency_ms.p99", 2.0, added=True),
    Goal("added p50 ms at 200/s", "whole.opened_200.latency_ms.p50", 2.0, added=True),
    Goal("added p99 ms at 200/s", "whole.opened_200.latency_ms.p99", 2.0, added=True),
    Goal("longest ms at 200/s, 60 s", "whole.opened_200.latency_ms.max", bound=20),
    Goal("added TTFT p50 ms, 8 paced", "paced.closed.first_byte_ms.p50", 1.2, added=True),
    Goal("memory MB after load, PSS", "memory_mb.proportional", bound=90),
    Goal("two workers' CPU, x of one", "whole.two_workers_times", bound=1.05),
)
COUNTS = {
    "system calls a request": "counts.syscalls",
    "Redis commands a request": "counts.redis_commands",
    "syncs a request": "whole.spool.syncs",
    "allocations a request": "counts.allocations",
}
"""Rows without a goal, and the path to each."""


def find(result: Mapping[str, Any], side: str, path: str) -> Value:
    """Return a figure of a side; None where it has none."""
    found: Any = result.get(side)
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    figure: Value = found
    return figure


def figure_of(result: Mapping[str, Any], side: str, goal: Goal) -> Value:
    found = find(result, side, goal.path)
    if goal.added and found is not None:
        found -= find(result, "straight", goal.path) or 0.0
    return found


def goals_table(result: Mapping[str, Any], peers: Mapping[str, str]) -> str:
    """Write a line for each goal and count. `peers`: the titles of those that were measured."""
    sides = {**peers, "gateway": "us", "bare": "floor"}
    head = [f"{'':28}{'goal':>24}", *(f"{title:>12}" for title in sides.values())]
    lines = ["".join([*head, f"{'x SMG':>8}  "])]
    for goal in GOALS:
        values = {side: figure_of(result, side, goal) for side in sides}
        mine, theirs = values["gateway"], values.get(PEER)
        ratio = f"{mine / theirs:.2f}" if mine is not None and theirs else ""
        cells = "".join(f"{shown(each):>12}" for each in values.values())
        verdict = goal.verdict(mine, theirs)
        lines.append(f"{goal.title:28}{goal.written:>24}{cells}{ratio:>8}  {verdict}")
    for title, path in COUNTS.items():
        cells = "".join(f"{shown(find(result, side, path)):>12}" for side in sides)
        lines.append(f"{title:28}{'':24}{cells}")
    return "\n".join(lines)


def shown(value: Value) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


def medians(results: Sequence[Any]) -> Any:
    """Return the median of each figure of several rounds; of what is no figure, the last."""
    last = results[-1]
    if isinstance(last, Mapping):
        return {name: medians([each[name] for each in results]) for name in last}
    if isinstance(last, int | float) and not isinstance(last, bool):
        return median(results)
    return last
