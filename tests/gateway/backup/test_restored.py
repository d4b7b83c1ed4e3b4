"""A restore brings back what was there: schema, rows, spools and files, by the command line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.events import Quantities, UsageEvent
from billing.ingestion.ingest import ingest
from billing.ingestion.shipper import Alarms, adopt
from billing.spool.format import Checkpoint, CloseRecord, OpenRecord, Record, SegmentStart, frame
from gateway.backup.cutting import RowBatch
from gateway.backup.errors import BackupError
from gateway.backup.restoration import RestoredDatabase, Work
from gateway.backup.snapshot import libpq_environment, open_snapshot
from gateway.cli.main import tollgate
from gateway.db import create_engine
from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from tests.billing.samples import NOON, an_attempt, an_event
from tests.scratch import make_scratch

CHOSEN = re.compile(r"^\\(un)?restrict .*$| CONSTRAINT \w+(?= NOT NULL)", re.MULTILINE)
"""Names that a server or pg_dump chooses: CREATE TABLE ... LIKE copied those of NOT NULL, which
are then taken when the schema is made anew."""
STRANGE = "tab\t, line\n, back\\slash, \\N, \\., ü, 🦜, 'quote' and \"quote\""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Pytest's own folders are too long for a socket."""
    made = make_scratch()
    yield made
    shutil.rmtree(made)


class Installation:
    """One on this test's own database, with usage in its books and in a spool."""

    def __init__(self, folder: Path, database_url: str, redis_url: str) -> None:
        self.folder, self.database_url = folder, database_url
        self.home = Home(folder / "home")
        self.archive, self.key = str(folder / "archive"), str(folder / "backup.key")
        self.environ = {
            "TOLLGATE_HOME": str(self.home.root),
            "TOLLGATE_DATABASE_URL": database_url,
            "TOLLGATE_REDIS_URL": redis_url,
            "TOLLGATE_CONFIG": str(folder / "tollgate.toml"),
        }
        (folder / "tollgate.toml").write_text('log_level = "warning"\n')
        self.run("migrate")
        self.recipient = self.run("backup", "key", self.key).strip()

    def run(self, *arguments: str, status: int = 0) -> str:
        return run(self.environ, *arguments, status=status)

    def create(self) -> str:
        """Make a backup; returns its name."""
        said = self.run("backup", "create", "--to", self.recipient, "--json", self.archive)
        return str(json.loads(said)["name"])

    def leave_spool(self, *records: Record, torn: int = 0) -> None:
        """Leave a spool of a gateway that died, and an unfinished record behind it."""
        path = self.home.spool / "worker-0"
        path.mkdir(parents=True)
        data = b"".join(map(frame, (SegmentStart([]), *records)))
        rest = frame(OpenRecord(an_attempt()))[:torn]
        (path / "00000001.log").write_bytes(data + rest)
        (path / "lock").touch()


def run(environ: dict[str, str], *arguments: str, status: int = 0) -> str:
    """Run `tollgate ARGUMENTS`, which exits with `status`; returns what it says."""
    with ThreadPoolExecutor(1) as thread:  # a loop may run in this one
        done = thread.submit(CliRunner().invoke, tollgate, arguments, env=environ).result()
    assert done.exit_code == status, (done.output, done.exception)
    return done.output


def interrupted(steps: list[str], last: str) -> Callable[..., Awaitable[None]]:
    """`RestoredDatabase.run`, which notes the steps and fails once, in place of `last`."""
    whole, is_over = RestoredDatabase.run, False

    async def step(self: RestoredDatabase, name: str, work: Work) -> None:
        nonlocal is_over
        if name == last and not is_over:
            is_over = True
            raise BackupError("interrupted")
        steps.append(name)
        await whole(self, name, work)

    return step


@pytest.fixture
def installed(folder: Path, postgres_url: str, redis_url: str) -> Installation:
    return Installation(folder, postgres_url, redis_url)


@asynccontextmanager
async def running_postgres(home: Home) -> AsyncIterator[str]:
    postgres = await embedded.start_postgres(home, durable=False)
    try:
        yield embedded.postgres_url(home)
    finally:
        await postgres.stop(embedded.STOP_TIMEOUT_S)


def dump(database_url: str) -> list[str]:
    """All of a database, as lines in an order that no row's place in its table decides."""
    done = subprocess.run(
        [str(embedded.postgres_bin() / "pg_dump"), "--no-owner"],
        env=libpq_environment(database_url),
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted(CHOSEN.sub("", done.stdout).splitlines())


async def test_schema_rows_and_rights_are_those_that_were_there(
    installed: Installation, db: AsyncEngine
) -> None:
    async with db.begin() as conn:
        await conn.execute(
            sa.text("INSERT INTO orgs (id, name) VALUES ('org_strange', :name), ('org_a', 'a')"),
            {"name": STRANGE},
        )
    await ingest(db, [an_event() for _ in range(30)])
    installed.create()
    before = dump(installed.database_url)
    assert any("FORCE" in line or "ROW LEVEL SECURITY" in line for line in before)
    restored = Home(installed.folder / "other")
    into = {"TOLLGATE_HOME": str(restored.root), "TOLLGATE_CONFIG": "", "TOLLGATE_DATABASE_URL": ""}
    arguments = ("backup", "restore", "--identity", installed.key, installed.archive)
    steps: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RestoredDatabase, "run", interrupted(steps, "after.100"))
        run(into, *arguments, status=1)
        assert "is not finished" in run(into, "keys", "list", status=2)
        assert "is restored" in run(into, *arguments)
    assert len(steps) == len({*steps}) > 200  # none was done twice
    async with running_postgres(restored) as database_url:
        assert dump(database_url) == before
        engine = create_engine(database_url, pool_size=1)
        async with engine.connect() as conn:
            name = await conn.scalar(sa.text("SELECT name FROM orgs WHERE id = 'org_strange'"))
            assert name == STRANGE
        await engine.dispose()
    assert restored.secret.read_bytes() == installed.home.secret.read_bytes()
    assert restored.credentials.read_bytes() == installed.home.credentials.read_bytes()
    assert {path.stat().st_mode & 0o777 for path in (restored.secret, restored.credentials)} == {
        0o600
    }
    assert (restored.root / "restored" / "tollgate.toml").read_text() == 'log_level = "warning"\n'
    assert run(into, *arguments, status=1).rstrip().endswith("restore into a new folder")


async def test_a_spool_and_the_books_agree_after_a_restore(
    installed: Installation, db: AsyncEngine
) -> None:
    """An attempt was open when the spool was read, and was booked before the snapshot was taken:
    it counts as it was booked. What only the spool has is booked from there."""
    async with db.begin() as conn:
        await conn.execute(sa.text("INSERT INTO orgs (id, name) VALUES ('org_a', 'a')"))
    booked, still_open, closed = an_event(), an_event(), an_event()
    part = Quantities(uncached_input=100, output=5)
    installed.leave_spool(
        *(OpenRecord(each.attempt) for each in (booked, still_open, closed)),
        *(Checkpoint(each.id, part, False, NOON + 1) for each in (booked, still_open)),
        CloseRecord(closed),
        torn=30,
    )
    await ingest(db, [booked])
    installed.create()
    restored = Home(installed.folder / "other")
    into = {"TOLLGATE_HOME": str(restored.root), "TOLLGATE_CONFIG": "", "TOLLGATE_DATABASE_URL": ""}
    run(into, "backup", "restore", "--identity", installed.key, installed.archive)
    assert "balance" in run(into, "reconcile")
    assert "whole" in run(into, "audit", "verify")
    recovered: list[UsageEvent] = []
    async with running_postgres(restored) as database_url:
        engine, alarms = create_engine(database_url, pool_size=1), Alarms()
        await adopt(engine, restored.spool / "worker-0", alarms, recovered.extend)
        assert (alarms.conflicts, alarms.refused) == (0, 0)
        async with engine.connect() as conn:
            rows = await conn.execute(sa.text("SELECT id, output, finish FROM usage_events"))
            assert {row.id: (row.output, row.finish == "recovered") for row in rows} == {
                booked.id: (20, False),
                closed.id: (20, False),
                still_open.id: (5, True),
            }
        await engine.dispose()
    assert [event.id for event in recovered] == [still_open.id]


def test_mistakes_are_told_in_one_line(installed: Installation, folder: Path) -> None:
    tell = installed.run
    assert "no recipient: give --to" in tell("backup", "create", installed.archive, status=1)
    assert "no complete backup" in tell("backup", "verify", installed.archive, status=1)
    assert "--identity" in tell("backup", "restore", installed.archive, status=2)
    name = installed.create()
    absent = ("backup", "verify", "--backup", "backup-2020", installed.archive)
    assert f"the newest is {name}" in tell(*absent, status=1)
    full = ("backup", "restore", "--identity", installed.key, installed.archive)
    assert "is not empty" in tell(*full, status=1)
    used = {**installed.environ, "TOLLGATE_HOME": str(folder / "other")}
    assert "the database is not empty" in run(used, *full, status=1)
    (folder / "tollgate.toml").write_text(f'[backup]\nrecipients = ["{installed.recipient}"]\n')
    assert ", 0 of them new" not in tell("backup", "create", installed.archive)
    assert "1 backups" in tell("backup", "prune", "--keep", "1", installed.archive)


async def test_a_user_who_does_not_own_the_tables_is_told_so(postgres_url: str) -> None:
    """Row-level security would hide rows from him."""

    async def use(_: RowBatch) -> None:
        raise AssertionError("rows that may not be all of them")

    async with open_snapshot(postgres_url, embedded.postgres_bin() / "pg_dump") as snapshot:
        await snapshot._connection.execute("SET ROLE tollgate_app")
        (table,) = (each for each in await snapshot.tables() if each.name == "usage_events")
        with pytest.raises(BackupError, match="must own the tables"):
            await snapshot.copy(table, use)


async def test_rows_are_written_meanwhile_and_the_schema_is_not(
    postgres_url: str, db: AsyncEngine
) -> None:
    rows: list[bytes] = []

    async def use(piece: RowBatch) -> None:
        rows.append(piece.data)

    async with open_snapshot(postgres_url, embedded.postgres_bin() / "pg_dump") as snapshot:
        async with db.begin() as conn:
            await conn.execute(sa.text("INSERT INTO orgs (id, name) VALUES ('org_late', 'late')"))
        owner = create_engine(postgres_url, pool_size=1)
        with pytest.raises(sa.exc.DBAPIError, match="lock timeout"):
            async with owner.begin() as conn:
                await conn.execute(sa.text("SET LOCAL lock_timeout = '20ms'"))
                await conn.execute(sa.text("ALTER TABLE orgs ADD COLUMN more int"))
        await owner.dispose()
        (orgs,) = (each for each in await snapshot.tables() if each.name == "orgs")
        await snapshot.copy(orgs, use)
    assert rows == []
