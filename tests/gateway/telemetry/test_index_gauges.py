"""Checks the gauges of the index of cached prefixes: shown while there is a choice of engines."""

from __future__ import annotations

from gateway.telemetry.metrics import Telemetry


def test_they_are_shown_while_there_is_an_index() -> None:
    telemetry = Telemetry(models=["m"])

    def shown() -> list[float | None]:
        names = ("entries", "lag_seconds", "silent_seconds")
        found = (f"tollgate_fleet_index_{name}" for name in names)
        return [telemetry.registry.get_sample_value(each) for each in found]

    telemetry.engine_gauges.show_index(None)
    assert shown() == [0, 0, 0]
    telemetry.engine_gauges.show_index((7, 0.125, 1.5))
    assert shown() == [7, 0.125, 1.5]
    telemetry.engine_gauges.show_index(None)
    assert shown() == [0, 0, 0]
