"""Checks the gauges of engines by state and of what the planner wants: zero once they are gone."""

from __future__ import annotations

import msgspec

from gateway.fleet.planner.view import PlannedModel
from gateway.telemetry.metrics import Telemetry

PLAN = PlannedModel(
    model="m",
    least=0,
    most=4,
    running=1,
    wanted=3,
    reasons=[],
    rate=1.0,
    expected_rate=2.5,
    work=1.5,
    start_s=12.0,
)


def test_engines_are_shown_by_state_until_their_model_is_gone() -> None:
    telemetry = Telemetry(models=["m"])

    def shown() -> list[float | None]:
        name, states = "tollgate_pool_replicas", ("serving", "away")
        labels = ({"model": "m", "state": state} for state in states)
        return [telemetry.registry.get_sample_value(name, each) for each in labels]

    telemetry.fleet.pools.show_pools({"m": {"serving": 2, "away": 1}})
    assert shown() == [2, 1]
    telemetry.fleet.pools.show_pools({"other": {"serving": 1, "away": 0}})
    assert shown() == [0, 0]


def test_a_plan_is_shown_until_there_is_none() -> None:
    telemetry = Telemetry(models=["m"])

    def shown() -> list[float | None]:
        names = ("wanted", "forecast_requests_per_second", "start_seconds")
        found = (f"tollgate_planner_{name}" for name in names)
        return [telemetry.registry.get_sample_value(each, {"model": "m"}) for each in found]

    telemetry.fleet.pools.show_plans([PLAN])
    assert shown() == [3, 2.5, 12.0]
    telemetry.fleet.pools.show_plans([msgspec.structs.replace(PLAN, start_s=None)])
    assert shown() == [3, 2.5, 0.0]
    telemetry.fleet.pools.show_plans([])
    assert shown() == [0, 0, 0]
