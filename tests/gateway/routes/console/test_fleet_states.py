"""The console's page of the fleet shows a model of which no engine runs as what it is."""

from __future__ import annotations

import msgspec

from gateway.fleet.router import Route
from gateway.routes.console.fleet import to_model
from tests.gateway.office import ScriptedReplica


def test_a_model_that_sleeps_is_not_down() -> None:
    awake = Route(model="m", kind="engine", replicas=(ScriptedReplica(),))
    assert to_model(awake, {}).state == ("serves", "ok")
    assert awake.pool_states() == {"serving": 1, "drained": 0, "away": 0, "asleep": 0}
    asleep = msgspec.structs.replace(awake, is_asleep=True)
    assert to_model(asleep, {}).state == ("asleep", "plain")
    assert asleep.pool_states() == {"serving": 0, "drained": 0, "away": 0, "asleep": 1}
