"""`tollgate spool` and what `tollgate reconcile` says of quarantined records, on a real home."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from billing.events import Attempt, Quantities, UsageEvent
from billing.spool.directory import SpoolDirectory
from billing.spool.format import (
    Checkpoint,
    CloseRecord,
    OpenRecord,
    Record,
    SegmentStart,
    frame,
)
from billing.spool.quarantine import Quarantine
from gateway.db import create_engine
from tests.billing.samples import NOON, an_attempt, an_event
from tests.gateway.cli.test_main import environ, folder, invoke

__all__ = ["environ", "folder"]

USED = Quantities(uncached_input=100, output=20)
SO_FAR = Quantities(uncached_input=100, output=5)


def on_database(environ: dict[str, str], query: str) -> list[tuple[Any, ...]]:
    async def work() -> list[tuple[Any, ...]]:
        engine = create_engine(environ["TOLLGATE_DATABASE_URL"], pool_size=1)
        async with engine.connect() as conn:
            rows = [tuple(row) for row in await conn.execute(sa.text(query))]
        await engine.dispose()
        return rows

    return asyncio.run(work())


class Installation:
    """A home whose one gateway died, and left a spool behind."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.environ = environ
        self.spools = Path(environ["TOLLGATE_HOME"]) / "spool"
        assert invoke(environ, "migrate").exit_code == 0
        assert invoke(environ, "orgs", "create", "--name", "acme").exit_code == 0
        query = "SELECT id FROM orgs WHERE name = 'acme'"
        ((self.org,),) = on_database(environ, query)

    def attempt(self) -> Attempt:
        return an_attempt(org=self.org)

    def leave(self, *records: Record, damaged: Record, byte: int = -6) -> None:
        """Leave a spool of these records, one of which has a damaged byte, and recover it as the
        next gateway does."""
        path = self.spools / "gateway-0"
        path.mkdir(parents=True)
        data = bytearray()
        for record in (SegmentStart([]), *records):
            data += frame(record)
            if record is damaged:
                data[byte] ^= 0x01
        (path / "00000001.log").write_bytes(data)
        (path / "lock").touch()

    def recover(self) -> None:
        SpoolDirectory(self.spools / "gateway-0", lock_wait_s=0).release()

    @property
    def quarantined(self) -> list[str]:
        return [entry.name for entry in Quarantine(self.spools).entries()]

    def run(self, *arguments: str) -> tuple[int, str]:
        result = invoke(self.environ, *arguments)
        return result.exit_code, result.output

    def booked(self) -> list[tuple[Any, ...]]:
        return on_database(
            self.environ, "SELECT kind, finish, uncached_input, output, estimated FROM usage_events"
        )

    def audited(self) -> list[tuple[Any, ...]]:
        return on_database(
            self.environ,
            "SELECT org_id = (SELECT id FROM orgs WHERE name = 'acme'), action, target "
            "FROM audit_entries WHERE action LIKE 'spool_record.%' ORDER BY 1",
        )


@pytest.fixture
def installed(environ: dict[str, str]) -> Installation:
    return Installation(environ)


def lost_close(installed: Installation) -> UsageEvent:
    """Leave a request whose only record but its admission is a damaged close."""
    event = an_event(installed.attempt(), USED)
    close = CloseRecord(event)
    installed.leave(OpenRecord(event.attempt), close, damaged=close)
    return event


def test_the_books_do_not_balance_while_a_record_waits(installed: Installation) -> None:
    lost_close(installed)
    code, said = installed.run("reconcile")
    assert code == 1 and "balance" not in said, "before a gateway has come upon it"
    assert said.startswith("damaged spool record gateway-0/00000001.log at ")
    assert "request req_1, project proj_a" in said
    installed.recover()
    (name,) = installed.quarantined
    code, said = installed.run("reconcile")
    assert code == 1
    assert said.splitlines()[0] == (
        f"quarantined spool record {name}: request req_1, project proj_a, organization "
        f"{installed.org}, model penny: 100 input and 20 output tokens by damaged bytes, "
        "not verified"
    )
    shown = json.loads(installed.run("spool", "show", name, "--json")[1])
    assert shown["request"] == "req_1" and shown["project"] == "proj_a"
    assert shown["accept bills"][0]["quantities"] == {"uncached_input": 100, "output": 20}


@pytest.mark.parametrize(
    ("verdict", "booked"),
    [("accept", ("usage", "done", 100, 20, True)), ("discard", ("waste", "done", 100, 20, True))],
)
def test_a_person_ends_it_once(
    installed: Installation, verdict: str, booked: tuple[Any, ...]
) -> None:
    lost_close(installed)
    installed.recover()
    (name,) = installed.quarantined
    for _ in range(2):
        code, said = installed.run("spool", verdict, name)
        assert code == 0, said
        assert installed.booked() == [booked]
        assert installed.audited() == [
            (False, f"spool_record.{verdict}ed", name),
            (True, f"spool_record.{verdict}ed", name),
        ]
    assert installed.quarantined == []
    assert installed.run("reconcile") == (0, "The books balance.\n")


def test_a_kill_after_the_books_is_made_good_by_a_repeat(
    installed: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost_close(installed)
    installed.recover()
    (name,) = installed.quarantined

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Quarantine, "resolve", killed)
        assert installed.run("spool", "accept", name)[0] != 0
    booked = installed.booked()
    assert installed.quarantined == [name] and len(booked) == 1
    code, said = installed.run("spool", "discard", name)
    assert code == 0 and f"{name} is accepted" in said, "the first verdict stands"
    assert installed.booked() == booked and len(installed.audited()) == 2
    assert installed.run("reconcile") == (0, "The books balance.\n")


def test_what_is_known_by_checkpoint_is_billed_by_itself(installed: Installation) -> None:
    event = an_event(installed.attempt(), USED)
    close = CloseRecord(event)
    so_far = Checkpoint(event.id, SO_FAR, False, NOON)
    installed.leave(OpenRecord(event.attempt), so_far, close, damaged=close)
    installed.recover()
    assert installed.quarantined == []
    (resolved,) = Quarantine(installed.spools).entries(resolved=True)
    assert resolved.context.outcome == "billed"
    code, said = installed.run("spool", "accept", resolved.name)
    assert (code, said) == (0, f"{resolved.name} waits for nobody: billed.\n")
    assert installed.run("reconcile")[0] == 0


def test_what_nobody_knows_anything_of_can_only_be_discarded(installed: Installation) -> None:
    path = installed.spools / "gateway-0"
    path.mkdir(parents=True)
    (path / "00000001.log").write_bytes(frame(SegmentStart([])) + b"?" * 50)
    installed.recover()
    (name,) = installed.quarantined
    code, said = installed.run("spool", "accept", name)
    assert code == 2 and "nothing is known of it" in said
    assert installed.run("spool", "discard", name)[0] == 0
    assert installed.audited() == [(False, "spool_record.discarded", name)]
    assert installed.run("reconcile") == (0, "The books balance.\n")
    for unknown in ("nobody", "../secret.json", "resolved", f"{name}.json"):
        code, said = installed.run("spool", "show", unknown)
        assert code == 2 and "no quarantined record" in said
