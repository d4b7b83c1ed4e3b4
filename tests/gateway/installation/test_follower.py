"""A change of stored settings is looked for in Postgres alone, taken up once, and reported."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.installation.follower import LOOK_S, REPORT_S, StoredSettingsFollower
from gateway.installation.items import HOME_SEEN, HomeState, generation, items, read_stored
from gateway.installation.merge import Merger, StoredSetting
from gateway.installation.model_versions import ModelVersion
from gateway.secret import Secret, SecretKey
from gateway.settings.load import Settings, load
from tests.gateway.whole_app import SECRET

HOME = "host:/home"
UPSTREAM = {"upstream": "https://far.example/v1"}


class Follower:
    """One with a clock of its own, that is told what to answer a reload with."""

    def __init__(self, db: AsyncEngine, folder: Path) -> None:
        self._db, self.secret_file = db, folder / "secret.json"
        self.secret_file.write_bytes(msgspec.json.encode(SECRET))
        config = folder / "tollgate.toml"
        config.write_text('[[model]]\nname = "near"\nupstream = "http://h/v1"\n')
        self.file: Settings = load({"home": folder / "home", "config": config}, {})
        self.now_s, self.problem = 0.0, ""
        self.in_force: list[tuple[str, ...]] = []
        self.stored = StoredSettingsFollower(db, HOME, self.secret_file, clock=lambda: self.now_s)

    async def reload(self) -> str:
        settings = await self.stored.merged_into(self.file)
        self.in_force.append(settings.model_names)
        return self.problem

    async def look(self) -> HomeState:
        """Look once; return what the home reports."""
        await self.stored.look(self.reload)
        return await self.read()

    async def read(self) -> HomeState:
        async with self._db.connect() as conn:
            (home,) = (await read_stored(conn)).homes
        return home

    async def store(self, item: StoredSetting, number: int) -> None:
        async with self._db.begin() as conn:
            row = {key: getattr(item, key) for key in ("kind", "name", "content", "home")}
            sealed = {"sealed": item.sealed, "secret_id": item.secret_id}
            await conn.execute(sa.insert(items).values(**row, **sealed))
            await conn.execute(sa.delete(generation))
            await conn.execute(sa.insert(generation).values(only=True, number=number))


@pytest.fixture
def follower(db: AsyncEngine, tmp_path: Path) -> Follower:
    return Follower(db, tmp_path)


async def test_a_change_is_taken_up_once_at_the_next_look(follower: Follower) -> None:
    assert LOOK_S <= 0.5, "in force within two seconds"
    assert (await follower.look()).number == 0
    await follower.store(StoredSetting(kind="model", name="far", content=UPSTREAM), 3)
    found = await follower.look()
    assert (found.number, found.problem) == (3, "")
    assert found.file_names == {"model": ["near"], "mcp_server": [], "deadlines": []}
    await follower.look()
    assert follower.in_force == [("near", "far")]


async def test_what_is_refused_is_reported_and_tried_again_at_the_next_change(
    follower: Follower,
) -> None:
    follower.problem = "no such variable"
    await follower.store(StoredSetting(kind="model", name="far", content=UPSTREAM), 1)
    for _ in range(2):
        found = await follower.look()
        assert (found.number, found.problem) == (1, "no such variable")
    assert len(follower.in_force) == 1
    follower.problem = ""
    await follower.store(StoredSetting(kind="model", name="wide", content=UPSTREAM), 2)
    found = await follower.look()
    assert (found.number, found.problem) == (2, "")


async def test_what_is_taken_up_is_reported_meanwhile_and_in_force_only_then(
    follower: Follower,
) -> None:
    """An engine may load for minutes: the home stays in sight, with the version that starts."""
    starting = ModelVersion(
        model="near", version="b" * 10, place="engine-1", state="starting", since=5
    )
    serving = msgspec.structs.replace(starting, state="serving", since=6)
    follower.stored.versions = lambda: [starting]
    meanwhile: list[HomeState] = []

    async def reload() -> str:
        await follower.reload()
        await follower.stored.report()
        meanwhile.append(await follower.read())
        follower.stored.versions = lambda: [serving]
        return ""

    await follower.store(StoredSetting(kind="model", name="far", content=UPSTREAM), 4)
    await follower.stored.look(reload)
    [seen], found = meanwhile, await follower.read()
    assert (seen.number, seen.running.models, seen.is_changing) == (0, (starting,), True)
    assert (found.number, found.running.models, found.is_changing) == (4, (serving,), False)
    assert found.running.release == version("tollgate")


async def test_what_was_only_tried_is_taken_up_all_the_same(follower: Follower) -> None:
    """A dry run merges what is stored, and nothing comes of it."""
    await follower.look()
    await follower.store(StoredSetting(kind="model", name="far", content=UPSTREAM), 1)
    await follower.stored.merged_into(follower.file)
    assert (await follower.look()).number == 1 and follower.in_force == [("near", "far")]


async def test_a_home_is_seen_for_as_long_as_it_runs(follower: Follower, db: AsyncEngine) -> None:
    assert REPORT_S < HOME_SEEN.total_seconds() / 2
    await follower.look()
    async with db.begin() as conn:
        await conn.execute(
            sa.text("UPDATE installation_homes SET seen_at = now() - '1 day'::interval")
        )
    await follower.stored.look(follower.reload)
    async with db.connect() as conn:
        assert (await read_stored(conn)).homes == ()
    follower.now_s += REPORT_S + 1
    assert (await follower.look()).home == HOME


async def test_a_program_that_was_sealed_anew_opens_without_a_restart(follower: Follower) -> None:
    """The secret has another key first since the follower was made."""
    newer = Secret(version=1, keys=(SecretKey(id="newer", secret="B" * 44), *SECRET.keys))
    follower.secret_file.write_bytes(msgspec.json.encode(newer))
    program = StoredSetting(kind="mcp_server", name="tool", content={"command": "/bin/true"})
    await follower.store(Merger(HOME, newer).as_program(program), 1)
    settings = await follower.stored.merged_into(follower.file)
    assert [each.name for each in settings.mcp.servers] == ["tool"]
