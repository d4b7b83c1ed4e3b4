"""Tests that a version answers for the model that a caller asked for."""

from __future__ import annotations

from gateway.fleet.router import Route
from gateway.routes.shared.reply import Reply
from tests.gateway.inference.test_generate import open_office
from tests.gateway.office import ScriptedReplica, read
from tests.gateway.registry.made import versions_of

__all__ = ["open_office"]


async def test_a_version_answers_in_the_name_and_at_the_price_of_its_model(open_office) -> None:
    office, serving = open_office(ScriptedReplica()), ScriptedReplica()
    fleet = office.services.fleet
    fleet.replace([*fleet.routes, Route(model="next", kind="upstream", replicas=(serving,))])
    fleet.versions = versions_of("m", "next", pinned_to="next")
    delivery = office.begin()
    assert await read(delivery) == b"w1 w2 w3 [3]"
    await office.settled()
    (event,) = await office.billed()
    assert serving.attempts == [event.id] and event.attempt.model == "m"
    assert delivery.version == 2
    assert Reply(delivery, stream=False).notes()["x-tollgate-model-version"] == "2"
