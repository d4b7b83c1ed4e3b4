"""/v1/admin/fleet shows each replica with what its engine said last."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.fake.engine import FakeCore, FakeEngine
from engine.protocol import StepCosts
from gateway.fleet.drain_marks import DrainMarks
from gateway.fleet.engine.kept_prefixes import unheard
from gateway.fleet.engine.routes import engine_routes
from gateway.fleet.kv_index import KvIndex
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.health.component import replica_component
from gateway.health.readiness import may_serve
from gateway.routes.admin.installation.fleet import (
    FleetReplica,
    PromptTokens,
    prefill_speed_of,
    to_view,
)
from gateway.settings.models import ModelConfig
from tests.gateway.routes.admin.conftest import World

ADDRESSES = ("unix:/engine-0.sock", "unix:/engine-2.sock")


@pytest.fixture
def marks(tmp_path: Path) -> DrainMarks:
    return DrainMarks(tmp_path / "drain_marks")


async def test_an_engine_tells_how_full_and_how_fast_it_is(
    model_folder: Path, marks: DrainMarks, tmp_path: Path
) -> None:
    config = ModelConfig(name="m", path=model_folder, engines=ADDRESSES, starts_engine=True)
    index = KvIndex(tmp_path / "kv_index")
    first, second = FakeEngine(FakeCore()), FakeEngine(FakeCore())
    second.lose()
    threads = PrepareThreads()
    [route] = engine_routes(config, [first, second], threads, unheard, marks, index)
    status = replace(
        first.status,
        kv_cache_usage=0.25,
        prefix_cache_hit_tokens=30,
        prefix_cache_query_tokens=40,
        host_hit_tokens=5,
        tier_hit_tokens=4,
        fetched_tokens=3,
        generated_tokens=7,
    )
    here, away = (
        to_view(
            FleetReplica(
                route=route,
                replica=replica,
                health=replica_component("engine", replica),
                status=said,
            )
        )
        for replica, said in zip(route.replicas, (status, None), strict=True)
    )
    threads.close()
    assert (here.id, here.model, here.state) == ("m/0", "m", "serving")
    assert here.engine_id == status.engine_id and here.max_model_len == status.max_model_len
    assert (here.kv_used, here.hit_rate) == (0.25, 0.75)
    tokens = PromptTokens(pool=18, host=5, disk=4, fetched=3, computed=10)
    assert (here.prompt_tokens, here.generated_tokens) == (tokens, 7)
    assert here.lanes is not None and list(here.lanes) == list(status.lanes)
    assert (here.costs is None) == (status.costs == StepCosts())
    assert (away.prompt_tokens, away.lanes, away.predicted_ttft_s) == (None, None, None)
    assert (away.id, away.state) == ("m/2", "unreachable")
    assert (away.engine_id, away.kv_used, away.hit_rate) == (None, None, None)


async def test_a_place_where_nobody_joined_is_vacant_and_waited_for_by_nobody(
    model_folder: Path, marks: DrainMarks, tmp_path: Path, threads: PrepareThreads
) -> None:
    joined = ("unix:/engine-1000.sock",)
    config = ModelConfig(
        name="m", path=model_folder, engines=joined, joined=joined, starts_engine=True
    )
    engine = FakeEngine(FakeCore())
    [route] = engine_routes(
        config, [engine], threads, unheard, marks, KvIndex(tmp_path / "kv_index")
    )
    [replica] = route.replicas
    assert (replica_component("engine", replica).state, may_serve(replica)) == ("ok", True)
    engine.lose()
    component = replica_component("engine", replica)
    assert (component.state, component.is_good, may_serve(replica)) == ("vacant", True, True)
    found = FleetReplica(route=route, replica=replica, health=component, status=None)
    assert to_view(found).state == "vacant"


def test_its_speed_is_that_of_its_fastest_lane() -> None:
    status = FakeCore().status()
    lanes = {
        lane: replace(each, prefill_tokens_per_s=speed)
        for (lane, each), speed in zip(status.lanes.items(), (10.0, 20.0, 0.0), strict=True)
    }
    assert prefill_speed_of(replace(status, lanes=lanes)) == 20.0
    assert prefill_speed_of(replace(status, lanes={})) is None


async def test_a_replica_tells_since_when_it_is_drained_or_not_any_more(
    model_folder: Path, threads: PrepareThreads, tmp_path: Path
) -> None:
    moments = iter([2000.0, 3000.0])
    marks = DrainMarks(tmp_path / "drain_marks", clock=moments.__next__)
    config = ModelConfig(name="m", path=model_folder, engines=ADDRESSES, starts_engine=True)
    engines = [FakeEngine(FakeCore()) for _ in ADDRESSES]
    index = KvIndex(tmp_path / "kv_index")
    [route] = engine_routes(config, engines, threads, unheard, marks, index)
    replica = route.replicas[1]

    def shown() -> tuple[str, int | None]:
        health = replace(replica_component("engine", replica), since=1000)
        each = FleetReplica(route=route, replica=replica, health=health, status=None)
        return to_view(each).state, to_view(each).since

    assert shown() == ("serving", 1000)
    marks.mark(2)
    assert shown() == ("drained", 2000)
    marks.remove(2)
    assert shown() == ("serving", 3000)


async def test_an_upstream_is_listed_too(world: World) -> None:
    listed = (await world.call("GET", "/v1/admin/fleet")).json()
    [far] = [each for each in listed["data"] if each["model"] == "far"]
    assert (far["id"], far["kind"], far["engine_id"]) == ("far/0", "upstream", None)
    assert (await world.call("GET", "/v1/admin/fleet/far/0")).json() == far
    missing = await world.call("GET", "/v1/admin/fleet/far/1")
    assert missing.status_code == 404 and missing.json()["param"] == "replica"


async def test_a_drained_replica_gets_nothing_new_and_the_last_one_is_not_drained(
    world: World, model_folder: Path, threads: PrepareThreads, tmp_path: Path
) -> None:
    config = ModelConfig(name="m", path=model_folder, engines=ADDRESSES, starts_engine=True)
    index = KvIndex(tmp_path / "kv_index")
    services = world.services
    fleet, marks = services.generation.fleet, services.drain_marks
    engines = [FakeEngine(FakeCore()) for _ in ADDRESSES]
    [route] = engine_routes(config, engines, threads, unheard, marks, index)
    before = fleet.routes
    fleet.replace([*before, route])
    try:
        done = await world.call("PATCH", "/v1/admin/fleet/m/2", {"drained": True})
        assert (done.status_code, done.json()["state"]) == (200, "drained"), done.text
        assert done.json()["since"] is not None
        assert [each.name for each in fleet.order(route)] == ["m/0"]
        last = await world.call("PATCH", "/v1/admin/fleet/m/0", {"drained": True})
        assert (last.status_code, last.json()["param"]) == (400, "drained"), last.text
        assert "o other replica of m takes requests" in last.json()["detail"]
        back = await world.call("PATCH", "/v1/admin/fleet/m/2", {"drained": False})
        assert back.json()["state"] == "serving" and len(fleet.order(route)) == 2
        audit = (await world.call("GET", "/v1/organization/audit_logs?limit=2")).json()["data"]
        assert [each["type"] for each in audit] == ["replica.undrained", "replica.drained"]
        engines[0].lose()
        kept = await world.call("PATCH", "/v1/admin/fleet/m/2", {"drained": True})
        assert (kept.status_code, kept.json()["param"]) == (400, "drained"), "m/0 is down"
        far = await world.call("PATCH", "/v1/admin/fleet/far/0", {"drained": True})
        assert "n upstream is not drained" in far.json()["detail"]
    finally:
        fleet.replace(before)


async def test_a_planner_without_a_range_has_nothing_to_decide(world: World) -> None:
    said = (await world.call("GET", "/v1/admin/planner")).json()
    nothing: dict[str, list[object]] = {"models": [], "changes": [], "engines": []}
    assert said == {"object": "planner", "mode": "on", "at": None, **nothing}
