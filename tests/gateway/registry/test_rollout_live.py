"""A rollout through the path of every request, and in Postgres: what is worse is taken back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.app.rollout_looks import ABSENT_S, RolloutLooks
from gateway.audit.log import COMMAND_LINE
from gateway.audit.tables import entries
from gateway.db import tenant
from gateway.fleet.replica import EventTaker, PreparedRequest, ReplicaHealth
from gateway.fleet.router import Fleet, Route
from gateway.generation_events import ReplicaEvent, TextDelta
from gateway.lanes import Priority
from gateway.principal import Plan
from gateway.registry import rollout as states
from gateway.registry.changes import add_version, read_table, remove_version, set_pin
from gateway.registry.comparison import Outcomes
from gateway.registry.evaluations import add_evaluation
from gateway.registry.rollout import ModelRollout, group_of
from gateway.registry.rollout_changes import (
    add_outcomes,
    change_rollout,
    get_rollout,
    look_at,
    start_rollout,
)
from gateway.tenancy.errors import Conflict, InvalidField, NotFound
from gateway.tenancy.orgs import create_org
from tests.gateway.inference.test_generate import open_office
from tests.gateway.office import Office, ScriptedReplica, read, usage

__all__ = ["open_office"]

SORRY = "I'm sorry, but I can't help with that."
GENEROUS = Plan(name="test", tokens_per_minute=10**9, requests_per_minute=10**6)
PER_LOOK = 40


class RefusingReplica(ScriptedReplica):
    """Declines each `nth` request; 0: none."""

    def __init__(self, nth: int = 0) -> None:
        super().__init__()
        self.nth = nth
        self.is_there = True

    async def stream(
        self,
        prepared: PreparedRequest,
        *,
        attempt_id: str,
        cache_salt: str,
        priority: Priority,
        taker: EventTaker | None = None,
    ) -> AsyncGenerator[ReplicaEvent, None]:
        self.attempts.append(attempt_id)
        refuses = self.nth and len(self.attempts) % self.nth == 0
        said = TextDelta(index=0, text=SORRY if refuses else "Yes.", finish_reason="stop")
        yield ReplicaEvent(items=(said,), usage=usage(1), finished=True)

    def health(self) -> ReplicaHealth:
        return ReplicaHealth(name=self.name, available=self.is_there)


@pytest.fixture
async def operator(db: AsyncEngine) -> str:
    async with db.begin() as conn:
        return (await create_org(conn, name="house", is_operator=True, actor=COMMAND_LINE)).id


async def started(db: AsyncEngine, operator: str, **wanted: Any) -> ModelRollout:
    """Start a rollout of version 2 of `m`, which `next` serves."""
    async with tenant(db, operator) as conn:
        by = {"operator_org": operator, "actor": COMMAND_LINE}
        await add_version(conn, model="m", served_by="next", digests={"m": "a", "next": "b"}, **by)
        given = {"model": "m", "version": 2, "steps": (25,), "least": 500, "watch": 0}
        return await start_rollout(conn, **{**given, **wanted}, **by)


async def follow(db: AsyncEngine, fleet: Fleet) -> None:
    async with db.connect() as conn:
        table = await read_table(conn)
    table.go_on(fleet.versions)
    fleet.versions = table


def some_orgs(rollout: ModelRollout) -> list[str]:
    """Return organizations of which a quarter is among the first."""
    named = [f"org_{number}" for number in range(200)]
    new = [org for org in named if group_of(org, rollout.id) < 25][:2]
    return new + [org for org in named if group_of(org, rollout.id) >= 25][:6]


async def ask(office: Office, org: str) -> int | None:
    """Return the version that answers an organization."""
    office.org = org
    delivery = office.begin(GENEROUS)
    await read(delivery)
    return delivery.version


async def test_a_version_that_refuses_five_points_more_is_taken_back(
    open_office: Any, system_db: AsyncEngine, operator: str
) -> None:
    office = open_office(RefusingReplica())
    fleet, worse = office.services.fleet, RefusingReplica(nth=20)
    fleet.replace([*fleet.routes, Route(model="next", kind="upstream", replicas=(worse,))])
    rollout = await started(system_db, operator)
    await follow(system_db, fleet)
    looks, orgs = RolloutLooks(system_db, fleet), some_orgs(rollout)
    while rollout.is_active and len(worse.attempts) < 500:
        batch = orgs * (PER_LOOK // len(orgs))
        versions = await asyncio.gather(*(ask(office, org) for org in batch))
        assert versions == [2 if org in orgs[:2] else 1 for org in batch]
        await office.settled()
        await looks.look()
        async with system_db.connect() as conn:
            rollout = await get_rollout(conn, rollout.id)
    assert rollout.state == "taken_back" and rollout.reason.startswith("refused ")
    assert rollout.progress.new.requests == len(worse.attempts) < 500
    await follow(system_db, fleet)
    assert fleet.versions.shares == []
    assert {await ask(office, org) for org in orgs} == {1}
    async with tenant(system_db, operator) as conn:
        asked = sa.select(entries).where(entries.c.action == "model_rollout.updated")
        [entry] = (await conn.execute(asked)).all()
    assert entry.actor_id == "rollout" and "taken_back" in entry.after


async def test_it_grows_and_becomes_everybodys_where_it_is_no_worse(
    open_office: Any, system_db: AsyncEngine, operator: str
) -> None:
    office = open_office(RefusingReplica())
    fleet = office.services.fleet
    fleet.replace(
        [*fleet.routes, Route(model="next", kind="upstream", replicas=(RefusingReplica(),))]
    )
    rollout = await started(system_db, operator, steps=(25, 100), least=4, watch=2)
    looks, orgs = RolloutLooks(system_db, fleet), some_orgs(rollout)
    seen = []
    for _ in range(4):
        await follow(system_db, fleet)
        seen.append({org: await ask(office, org) for org in orgs * 2}[orgs[0]])
        await office.settled()
        await looks.look()
    assert seen == [1, 2, 2, 2]
    async with system_db.connect() as conn:
        assert (await get_rollout(conn, rollout.id)).state == "completed"
        pins = (await read_table(conn)).models["m"].pinned_for_all
    assert pins is not None and pins.version.version == 2
    assert {await ask(office, org) for org in orgs} == {2}


async def test_a_rollout_ends_also_where_there_are_as_many_pins_as_may_be(
    system_db: AsyncEngine, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = await started(system_db, operator)
    monkeypatch.setattr("gateway.registry.changes.MAX_PINS", 0)
    async with tenant(system_db, operator) as conn:
        pinned = {"operator_org": operator, "actor": COMMAND_LINE, "model": "m", "version": 2}
        with pytest.raises(InvalidField, match="there may be 0 pins"):
            await set_pin(conn, scope="org", scope_id=operator, **pinned)
        ended = await change_rollout(conn, rollout.id, states.completed, actor=COMMAND_LINE)
        assert ended.state == "completed"


async def test_of_all_who_look_at_once_one_decides(system_db: AsyncEngine, operator: str) -> None:
    rollout = await started(system_db, operator, steps=(25,))
    async with system_db.begin() as conn:
        await add_outcomes(conn, rollout, {3: Outcomes(requests=200, refused=80)})
        await add_outcomes(conn, rollout, {80: Outcomes(requests=600)})
        await add_outcomes(conn, rollout, {80: Outcomes(requests=200)})

    async def decide() -> str | None:
        async with tenant(system_db, operator) as conn:
            found = await look_at(conn, rollout.id, is_served=True)
        return None if found is None else found[0].state

    states_before = await asyncio.gather(*(decide() for _ in range(4)))
    assert states_before.count("running") == 1
    async with tenant(system_db, operator) as conn:
        asked = sa.select(entries.c.target).where(entries.c.action == "model_rollout.updated")
        assert (await conn.scalars(asked)).all() == [rollout.id]
        found = await get_rollout(conn, rollout.id)
    assert found.reason == ("refused 40.0% of 200 requests; the version before 0.0% of 800")


async def test_nobody_goes_without_an_answer_while_the_new_version_is_away(
    open_office: Any, system_db: AsyncEngine, operator: str
) -> None:
    office = open_office(RefusingReplica())
    fleet, away = office.services.fleet, RefusingReplica()
    fleet.replace([*fleet.routes, Route(model="next", kind="upstream", replicas=(away,))])
    rollout = await started(system_db, operator)
    await follow(system_db, fleet)
    away.is_there = False
    first = some_orgs(rollout)[0]
    assert await ask(office, first) == 1
    await office.settled()
    [share] = fleet.versions.shares
    assert not share.tally.take()
    fleet.replace(each for each in fleet.routes if each.model == "m")
    assert await ask(office, first) == 1
    now_s = [0.0]
    looks, seen = RolloutLooks(system_db, fleet, clock=lambda: now_s[0]), []
    for now_s[0] in (0.0, ABSENT_S - 1, ABSENT_S):
        await looks.look()
        async with system_db.connect() as conn:
            found = await get_rollout(conn, rollout.id)
        seen.append(found.state)
    assert seen == ["running", "running", "taken_back"]
    assert found.reason == "the version is not served any more"


async def test_what_a_rollout_decides_is_changed_by_it_alone(
    system_db: AsyncEngine, operator: str
) -> None:
    rollout = await started(system_db, operator)
    by: dict[str, Any] = {"operator_org": operator, "actor": COMMAND_LINE}
    wanted = {"model": "m", "version": 2, "steps": (5,), "least": 1, "watch": 0}
    async with tenant(system_db, operator) as conn:
        [own, following] = (await read_table(conn)).models["m"].versions.values()
        with pytest.raises(Conflict, match="is under way"):
            await start_rollout(conn, **wanted, **by)
        with pytest.raises(Conflict, match="is under way"):
            await set_pin(conn, model="m", scope="installation", scope_id="", version=2, **by)
        with pytest.raises(Conflict, match="is under way"):
            await remove_version(conn, following.id, check=lambda _: None, **by)
        await set_pin(conn, model="m", scope="org", scope_id=operator, version=1, **by)
        ended = await change_rollout(conn, rollout.id, states.aborted, actor=COMMAND_LINE)
        assert (ended.state, ended.percent) == ("aborted", 0)
        with pytest.raises(Conflict, match="has version 1"):
            await start_rollout(conn, **{**wanted, "version": own.version}, **by)
        with pytest.raises(NotFound):
            await start_rollout(conn, **{**wanted, "version": 9}, **by)
        await remove_version(conn, following.id, check=lambda _: None, **by)


async def test_a_rollout_needs_the_last_word_of_each_suite(
    system_db: AsyncEngine, operator: str
) -> None:
    by: dict[str, Any] = {"operator_org": operator, "actor": COMMAND_LINE}
    wanted = {"model": "m", "version": 2, "steps": (5,), "least": 1, "watch": 0}
    said = {"model": "m", "version": 2, "suite": "golden", "evidence": "score 0.97"}
    async with tenant(system_db, operator) as conn:
        versions = {"m": "a", "next": "b"}
        await add_version(conn, model="m", served_by="next", digests=versions, **by)
        with pytest.raises(Conflict, match="was not asked by the evaluation 'golden'"):
            await start_rollout(conn, **wanted, **by, suites=("golden",))
        await add_evaluation(conn, **said, passed=True, **by)
        with pytest.raises(Conflict, match="'json'"):
            await start_rollout(conn, **wanted, **by, suites=("golden", "json"))
    async with tenant(system_db, operator) as conn:
        await add_evaluation(conn, **said, passed=False, **by)
        with pytest.raises(Conflict, match="did not pass the evaluation 'golden'"):
            await start_rollout(conn, **wanted, **by, suites=("golden",))
    async with tenant(system_db, operator) as conn:
        await add_evaluation(conn, **said, passed=True, **by)
        assert (await start_rollout(conn, **wanted, **by, suites=("golden",))).is_active
