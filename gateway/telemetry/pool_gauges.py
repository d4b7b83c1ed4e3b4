"""Shows how many engines each model has, by state, and what the planner wants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from gateway.telemetry.metric_group import MetricGroup


class ShownPlan(Protocol):
    """Tells what a planner decided of one model."""

    @property
    def model(self) -> str: ...

    @property
    def wanted(self) -> int: ...

    @property
    def expected_rate(self) -> float: ...

    @property
    def start_s(self) -> float | None: ...


class PoolGauges:
    def __init__(self, group: MetricGroup) -> None:
        self._pools = group.gauge(
            "pool_replicas",
            "Engines of a model by state: serving, drained (it gets nothing new), away (it starts, "
            "has not joined or is down); asleep is 1 while it has none until somebody asks for it.",
            *("model", "state"),
            do="away for minutes: `tollgate fleet status`, and the engine's log.",
            mode="mostrecent",
        )
        self._wanted = group.gauge(
            "planner_wanted",
            "Engines that the planner wants of a model with a range of them.",
            "model",
            do="More than there are, for long: `tollgate fleet plan` says what is in the way.",
            mode="mostrecent",
        )
        self._forecast = group.gauge(
            "planner_forecast_requests_per_second",
            "Requests for a model as the planner expects them when an engine that is started now "
            "would serve.",
            "model",
            do="Beside what came then it says how good the forecast is.",
            mode="mostrecent",
        )
        self._starts = group.gauge(
            "planner_start_seconds",
            "How long the last engine of a model took to start.",
            "model",
            do="The planner looks so far ahead: the shorter, the fewer idle engines.",
            mode="mostrecent",
        )
        self._shown_pools: Mapping[str, Mapping[str, int]] = {}
        self._shown: frozenset[str] = frozenset()
        """The models of which the planner's decisions were shown last."""

    def show_pools(self, pools: Mapping[str, Mapping[str, int]]) -> None:
        """Show how many engines of each model are in each state, and zero of those that are not
        served any more."""
        before, self._shown_pools = self._shown_pools, pools
        for model, states in before.items():
            for state in states if model not in pools else ():
                self._pools.labels(model, state).set(0)
        for model, states in pools.items():
            for state, number in states.items():
                self._pools.labels(model, state).set(number)

    def show_plans(self, plans: Iterable[ShownPlan]) -> None:
        """Show what the planner decided last of each model, and zero of those that it has no
        more."""
        found = {each.model: each for each in plans}
        before, self._shown = self._shown, frozenset(found)
        for model in before | self._shown:
            plan = found.get(model)
            self._wanted.labels(model).set(0 if plan is None else plan.wanted)
            self._forecast.labels(model).set(0.0 if plan is None else plan.expected_rate)
            self._starts.labels(model).set((plan.start_s or 0.0) if plan is not None else 0.0)
