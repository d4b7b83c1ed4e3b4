"""From an alert that stands to a receiver: at least once, always under one id, whatever the
receiver does and whoever dies on the way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine
from standardwebhooks.webhooks import Webhook

from billing.alerts import alerts
from billing.alerts.alerts import CeilingUse, note_ceilings
from billing.invoices.accounts import BillingTerms, set_account
from gateway.audit.log import COMMAND_LINE
from gateway.db import tenant
from gateway.secret import Cipher
from gateway.webhooks import sender as sending
from gateway.webhooks.deliveries import QUEUE, ping_endpoint, redeliver
from gateway.webhooks.endpoints import (
    EndpointOnce,
    archive_endpoint,
    rotate_secret,
    update_endpoint,
)
from gateway.webhooks.outbox import fan_out
from gateway.webhooks.queue import MAX_RETRY_AFTER_S, lease, sweep
from tests.billing.invoices.billed import (
    ACCOUNT_MADE,
    OCTOBER,
    book,
    close_and_finalize,
    tokens,
)
from tests.gateway.webhooks.conftest import (
    OK,
    MakeSender,
    Receiver,
    add_endpoint,
    hurry,
    rows,
    says,
    turn,
)

ROOT = Path(__file__).resolve().parents[3]
MINUTE = 1_795_089_600


async def reach(db: AsyncEngine, org_id: str, percent: int = 50, scope_id: str = "key_1") -> None:
    """So much of a limit of 100 tokens is used in a minute."""
    use = CeilingUse(
        org_id=org_id,
        scope="key",
        scope_id=scope_id,
        measure="tokens_per_minute",
        minute=MINUTE,
        tokens=percent,
        limit=100,
    )
    await note_ceilings(db, [use])


async def states(db: AsyncEngine) -> list[tuple[str, int, int | None]]:
    query = "SELECT state, attempts, status FROM webhook_deliveries ORDER BY event_id"
    return [tuple(row) for row in await rows(db, query)]


async def test_an_alert_arrives_signed_and_says_what_was_reached(
    db: AsyncEngine,
    org_id: str,
    endpoint: EndpointOnce,
    receiver: Receiver,
    make_sender: MakeSender,
) -> None:
    outcomes: list[str] = []
    await reach(db, org_id, 85)
    sender = make_sender(on_outcome=outcomes.append)
    await turn(sender)
    await turn(sender)  # one attempt at a time for each endpoint
    await turn(sender)
    assert outcomes == ["delivered"] * 2
    assert await states(db) == [("delivered", 1, 204)] * 2
    [first, second] = receiver.received
    said = [Webhook(endpoint.secret).verify(each.body, each.headers) for each in (first, second)]
    assert [each["data"]["threshold_percent"] for each in said] == [50, 80]
    assert first.headers["content-type"] == "application/json"
    [alert, _] = await rows(db, "SELECT * FROM alerts ORDER BY id")
    assert first.headers["webhook-id"] == said[0]["data"].pop("alert_id") == alert.id
    assert datetime.fromisoformat(said[0].pop("timestamp")) == alert.occurred_at
    assert said[0] == {
        "type": "rate_limit.threshold_reached",
        "data": {
            "organization_id": org_id,
            "scope": {"type": "key", "id": "key_1"},
            "measure": "tokens_per_minute",
            "cap_id": None,
            "period": {"type": "hour", "start": "2026-11-19T12:00:00Z"},
            "threshold_percent": 50,
            "limit": {"value": "100", "unit": "tokens"},
            "used": {"value": "85", "unit": "tokens"},
            "reason": None,
        },
    }


async def test_an_invoice_arrives_signed(
    db: AsyncEngine, org_id: str, cipher: Cipher, receiver: Receiver, make_sender: MakeSender
) -> None:
    made = await add_endpoint(db, cipher, org_id, receiver.url, "invoice.finalized")
    async with db.begin() as conn:
        await set_account(conn, org_id=org_id, terms=BillingTerms(), now=ACCOUNT_MADE)
    await book(db, tokens(ACCOUNT_MADE, 1000, 10**10, org=org_id))
    invoice = await close_and_finalize(db, OCTOBER, org_id)
    await turn(make_sender())
    [got] = receiver.received
    said = Webhook(made.secret).verify(got.body, got.headers)
    assert (said["type"], said["data"]["invoice_id"]) == ("invoice.finalized", invoice.id)
    assert got.headers["webhook-id"] == f"{invoice.id}_finalized"


async def test_an_unforeseen_error_is_logged_and_the_delivery_tried_again(
    db: AsyncEngine,
    org_id: str,
    endpoint: EndpointOnce,
    receiver: Receiver,
    make_sender: MakeSender,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await reach(db, org_id)
    with monkeypatch.context() as patch:
        patch.setattr(sending, "headers", lambda *_: 1 / 0)
        await turn(make_sender(lease_s=0.0))
    assert "ZeroDivisionError" in caplog.text and receiver.received == []
    await turn(make_sender())
    assert len(receiver.received) == 1


async def test_it_goes_to_each_endpoint_that_asked_for_it_and_to_no_other(
    db: AsyncEngine, org_id: str, cipher: Cipher, receiver: Receiver, make_sender: MakeSender
) -> None:
    budget = "budget.threshold_reached"
    for path, asked in (("/a", ()), ("/b", ()), ("/money", (budget,)), ("/off", ()), ("/gone", ())):
        made = await add_endpoint(db, cipher, org_id, receiver.url + path, *asked)
        which = {"org_id": org_id, "endpoint_id": made.endpoint.id, "actor": COMMAND_LINE}
        async with tenant(db, org_id) as conn:
            if path == "/off":
                await update_endpoint(conn, fields={"enabled": False}, **which)  # type: ignore[arg-type]
            if path == "/gone":
                await archive_endpoint(conn, **which)  # type: ignore[arg-type]
    await reach(db, org_id)
    senders = [make_sender(), make_sender()]
    await asyncio.gather(*map(turn, senders))
    await asyncio.gather(*map(turn, senders))
    assert sorted(each.path for each in receiver.received) == ["/hook/a", "/hook/b"]
    [one, other] = [each.headers["webhook-id"] for each in receiver.received]
    assert one == other, "one event"


async def test_while_a_secret_is_rotated_both_verify(
    db: AsyncEngine,
    org_id: str,
    cipher: Cipher,
    endpoint: EndpointOnce,
    receiver: Receiver,
    make_sender: MakeSender,
) -> None:
    secrets = [endpoint.secret]
    for grace_s in (60, 0):
        async with tenant(db, org_id) as conn:
            made = await rotate_secret(
                conn,
                cipher,
                org_id=org_id,
                endpoint_id=endpoint.endpoint.id,
                grace_s=grace_s,
                actor=COMMAND_LINE,
            )
        secrets.append(made.secret)
        await reach(db, org_id, scope_id=f"key_{grace_s}")
        await turn(make_sender())
        got = receiver.received[-1]
        good = secrets[-2:] if grace_s else secrets[-1:]
        assert len(got.headers["webhook-signature"].split(" ")) == len(good)
        for secret in good:
            Webhook(secret).verify(got.body, got.headers)
    async with db.connect() as conn:
        assert await conn.scalar(sa.text("SELECT secret_sealed FROM webhook_endpoints")) is not None


async def test_what_fails_is_tried_again_under_the_same_id(
    db: AsyncEngine,
    org_id: str,
    endpoint: EndpointOnce,
    receiver: Receiver,
    make_sender: MakeSender,
) -> None:
    receiver.script = [
        says("500 Oh", body=b"x" * 100_000),
        says("503 Later", "retry-after: 600"),
        OK,
    ]
    outcomes: list[str] = []
    now = [time.time()]
    sender = make_sender(on_outcome=outcomes.append, wall_clock=lambda: now[0])
    await reach(db, org_id)
    waits = []
    for _ in range(3):
        await turn(sender)
        await turn(sender)  # not due
        query = "SELECT extract(epoch FROM due_at - now()) AS s FROM webhook_deliveries"
        waits.append(float((await rows(db, query))[0].s))
        await hurry(db)
        now[0] += 1
    assert outcomes == ["failed", "failed", "delivered"]
    assert 3 < waits[0] <= 5 and 590 < waits[1] <= 600 < MAX_RETRY_AFTER_S
    assert await states(db) == [("delivered", 3, 204)]
    assert len({each.headers["webhook-id"] for each in receiver.received}) == 1
    assert len({each.headers["webhook-timestamp"] for each in receiver.received}) == 3
    for each in receiver.received:
        Webhook(endpoint.secret).verify(each.body, each.headers)


async def test_who_hangs_redirects_or_talks_for_ever_holds_up_nobody(
    db: AsyncEngine, org_id: str, cipher: Cipher, receiver: Receiver, make_sender: MakeSender
) -> None:
    elsewhere = receiver.url + "/elsewhere"

    async def hang(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async def talk(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()

    receiver.script = [hang, says("307 Moved", f"location: {elsewhere}"), talk]
    for name in "abc":
        await add_endpoint(db, cipher, org_id, f"{receiver.url}/{name}")
    await reach(db, org_id)
    sender = make_sender(timeout_s=60.0)
    await sender.poll()
    query = "SELECT state, status, failure FROM webhook_deliveries ORDER BY status"
    async with asyncio.timeout(30):
        while sum(each.status is not None for each in await rows(db, query)) < 2:
            await asyncio.sleep(0.01)
    assert [tuple(each) for each in await rows(db, query)] == [
        ("delivered", 200, None),
        ("pending", 307, "a redirect is not followed"),
        ("pending", None, None),  # which still hangs
    ]
    assert len(receiver.received) == 3, "nobody was asked elsewhere"


async def test_who_hangs_is_given_up_on(
    db: AsyncEngine,
    org_id: str,
    endpoint: EndpointOnce,
    receiver: Receiver,
    make_sender: MakeSender,
) -> None:
    async def hang(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    receiver.script = [hang]
    await reach(db, org_id)
    await turn(make_sender(timeout_s=0.5))
    found = await rows(db, "SELECT state, status, failure FROM webhook_deliveries")
    assert [tuple(each) for each in found] == [("pending", None, "EgressTimeout")]


async def test_who_wants_no_more_is_asked_no_more_until_somebody_says_so(
    db: AsyncEngine,
    org_id: str,
    endpoint: EndpointOnce,
    receiver: Receiver,
    make_sender: MakeSender,
) -> None:
    receiver.script = [says("410 Gone"), OK]
    sender = make_sender()
    await reach(db, org_id, 85)
    for _ in range(3):
        await turn(sender)
    assert await states(db) == [("dead", 1, 410), ("pending", 0, None)]
    actions = "SELECT action, actor_id FROM audit_entries WHERE action LIKE '%disabled'"
    assert [tuple(each) for each in await rows(db, actions)] == [
        ("webhook_endpoint.disabled", "webhooks")
    ]
    async with tenant(db, org_id) as conn:
        await update_endpoint(
            conn,
            org_id=org_id,
            endpoint_id=endpoint.endpoint.id,
            fields={"enabled": True},
            actor=COMMAND_LINE,
        )
    await turn(sender)
    assert await states(db) == [("dead", 1, 410), ("delivered", 1, 204)]


async def test_after_a_day_it_is_given_up_and_can_be_asked_for_again(
    db: AsyncEngine,
    org_id: str,
    endpoint: EndpointOnce,
    receiver: Receiver,
    make_sender: MakeSender,
    caplog: pytest.LogCaptureFixture,
) -> None:
    receiver.script = [says("500 Oh"), says("500 Oh"), OK]
    outcomes: list[str] = []
    sender = make_sender(on_outcome=outcomes.append, draw=lambda low, high: 100.0)
    await reach(db, org_id)
    await turn(sender)
    async with db.begin() as conn:
        last = "UPDATE webhook_deliveries SET due_at = now(), expires_at = now() + '1 minute'"
        await conn.execute(sa.text(last))
    await turn(sender)
    assert await states(db) == [("dead", 2, 500)] and outcomes[-1] == "dead"
    assert "given up" in caplog.text
    [delivery] = await rows(db, "SELECT id FROM webhook_deliveries")
    async with tenant(db, org_id) as conn:
        again = await redeliver(
            conn,
            org_id=org_id,
            endpoint_id=endpoint.endpoint.id,
            delivery_id=delivery.id,
            actor=COMMAND_LINE,
        )
    assert (again.state, again.attempts) == ("pending", 0)
    await turn(sender)
    assert await states(db) == [("delivered", 1, 204)]
    assert len({each.headers["webhook-id"] for each in receiver.received}) == 1


async def test_what_nobody_could_send_expires_and_is_forgotten_after_a_month(
    db: AsyncEngine, system_db: AsyncEngine, org_id: str, endpoint: EndpointOnce
) -> None:
    async with tenant(db, org_id) as conn:
        for _ in range(2):
            await ping_endpoint(
                conn,
                org_id=org_id,
                endpoint_id=endpoint.endpoint.id,
                now=datetime.now(tz=UTC),
                actor=COMMAND_LINE,
            )
    await reach(db, org_id)
    async with db.begin() as conn:
        await conn.execute(sa.text("UPDATE webhook_deliveries SET expires_at = now()"))
        old = "created_at = now() - interval '31 days'"
        one = "(SELECT min(id) FROM webhook_deliveries)"
        await conn.execute(sa.text(f"UPDATE webhook_deliveries SET {old} WHERE id = {one}"))
        await conn.execute(sa.text("UPDATE alerts SET occurred_at = now() - interval '91 days'"))
    assert await sweep(system_db, QUEUE) == 2
    assert await states(db) == [("dead", 0, None)]
    assert await sweep(system_db, QUEUE) == 0
    await alerts.sweep(system_db)
    assert await rows(db, "SELECT 1 FROM alerts UNION ALL SELECT 1 FROM ceiling_minutes") == []


async def test_a_lease_is_ones_own_and_ends_by_itself(
    db: AsyncEngine, system_db: AsyncEngine, org_id: str, endpoint: EndpointOnce,
    receiver: Receiver, make_sender: MakeSender,
) -> None:  # fmt: skip
    await reach(db, org_id)
    slow, quick = make_sender(), make_sender()
    written = asyncio.Event()

    async def wait(writer: asyncio.StreamWriter) -> None:
        await written.wait()
        await says("500 Late")(writer)

    receiver.script = [wait, OK]
    await slow.poll()
    await turn(quick)
    assert len(receiver.received) == 1, "it is leased"
    async with db.begin() as conn:
        await conn.execute(sa.text("UPDATE webhook_deliveries SET leased_until = now()"))
    await turn(quick)
    assert await states(db) == [("delivered", 2, 204)]
    written.set()
    await slow.drain()
    assert await states(db) == [("delivered", 2, 204)], "whose lease has ended is not heard"


async def test_one_org_takes_a_part_of_a_sender_and_one_endpoint_a_place(
    db: AsyncEngine, system_db: AsyncEngine, org_id: str, cipher: Cipher, receiver: Receiver
) -> None:
    for name in range(6):
        await add_endpoint(db, cipher, org_id, f"{receiver.url}/{name}")
    await reach(db, org_id, 85)
    while await fan_out(system_db):
        continue
    first = await lease(system_db, QUEUE, "a", limit=3, per_org=4)
    assert len({each.receiver_id for each in first}) == 3
    more = await lease(system_db, QUEUE, "a", limit=9, per_org=4, under_way=first)
    assert len(more) == 1 and more[0].receiver_id not in {each.receiver_id for each in first}
    assert await lease(system_db, QUEUE, "a", limit=9, per_org=4, under_way=[*first, *more]) == []


KILLED = """
import asyncio, base64, sys
from gateway.secret import Cipher
from gateway.db import ROLE_SYSTEM, create_engine
from gateway.net.egress import Egress
from gateway.webhooks.endpoints import CIPHER_PURPOSE
from gateway.webhooks.sender import Sender, WebhookChannel
from tests.gateway.webhooks.conftest import SECRET

async def main():
    db = create_engine(sys.argv[1], role=ROLE_SYSTEM)
    channel = WebhookChannel(Cipher(SECRET, CIPHER_PURPOSE), Egress(allow_loopback=True))
    sender = Sender(db, [channel], lease_s=2.0)
    await sender.poll()
    await sender.drain()

asyncio.run(main())
"""


async def test_a_sender_killed_between_the_answer_and_its_commit_sends_twice_under_one_id(
    db: AsyncEngine,
    postgres_url: str,
    org_id: str,
    endpoint: EndpointOnce,
    receiver: Receiver,
    make_sender: MakeSender,
) -> None:
    """At least once: the receiver tells them by `webhook-id`."""
    answered = asyncio.Event()
    async with db.connect() as conn:

        async def answer(writer: asyncio.StreamWriter) -> None:
            # From here on the outcome cannot be committed.
            await conn.execute(sa.text("SELECT id FROM webhook_deliveries FOR UPDATE"))
            await OK(writer)
            answered.set()

        receiver.script = [answer, OK]
        await reach(db, org_id)
        killed = subprocess.Popen(
            [sys.executable, "-c", KILLED, postgres_url],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            await asyncio.wait_for(answered.wait(), 60)
            await waiting_for_a_lock(db)
        finally:
            killed.send_signal(signal.SIGKILL)
            await asyncio.to_thread(killed.wait)
        await conn.rollback()
    assert await states(db) == [("pending", 1, None)]
    sender = make_sender()
    async with asyncio.timeout(30):
        while len(receiver.received) < 2:
            await turn(sender)
            await asyncio.sleep(0.1)
    first, second = receiver.received
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert first.body == second.body
    assert await states(db) == [("delivered", 2, 204)]


async def waiting_for_a_lock(db: AsyncEngine) -> None:
    async with asyncio.timeout(30):
        while not await rows(db, "SELECT 1 FROM pg_locks WHERE NOT granted"):
            await asyncio.sleep(0.02)


async def test_an_outage_of_postgres_ends_no_sender(
    db: AsyncEngine, org_id: str, endpoint: EndpointOnce, receiver: Receiver,
    make_sender: MakeSender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    failed = []

    async def away(*_: object, **__: object) -> int:
        if len(failed) < 2:
            failed.append(1)
            raise OSError
        return await fan_out(db)

    monkeypatch.setattr(sending, "fan_out", away)
    sender = make_sender(poll_s=0.01)
    sender.start()
    await reach(db, org_id)
    async with asyncio.timeout(30):
        while not receiver.received:
            await asyncio.sleep(0.01)
    await sender.close()
    assert "deliveries wait for Postgres (OSError)" in caplog.text
    assert json.loads(receiver.received[0].body)["type"] == "rate_limit.threshold_reached"


async def test_what_cannot_be_signed_or_written_down_is_tried_again(
    db: AsyncEngine,
    org_id: str,
    endpoint: EndpointOnce,
    receiver: Receiver,
    make_sender: MakeSender,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender = make_sender(lease_s=0.05)
    await reach(db, org_id)
    async with db.begin() as conn:
        await conn.execute(sa.text("UPDATE webhook_endpoints SET secret_id = 'gone'"))
    await turn(sender)
    assert await states(db) == [("pending", 1, None)] and receiver.received == []
    assert "does not open" in caplog.text and endpoint.secret not in caplog.text
    async with db.begin() as conn:
        await conn.execute(sa.text("UPDATE webhook_endpoints SET secret_id = 'one'"))

    async def away(*_: object) -> None:
        raise OSError

    await hurry(db)
    with monkeypatch.context() as patch:
        patch.setattr(sending, "end_attempt", away)
        await turn(sender)
    assert await states(db) == [("pending", 2, None)] and len(receiver.received) == 1
    assert "not written down (OSError)" in caplog.text
    await asyncio.sleep(0.1)
    await turn(sender)
    assert await states(db) == [("delivered", 3, 204)] and len(receiver.received) == 2


async def test_a_sender_gives_up_now_and_then_what_nobody_could_send(
    db: AsyncEngine, org_id: str, endpoint: EndpointOnce, make_sender: MakeSender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sending, "SWEEP_INTERVAL_S", 0.0)
    await reach(db, org_id)
    while await fan_out(db):
        continue
    async with db.begin() as conn:
        await conn.execute(sa.text("UPDATE webhook_deliveries SET expires_at = now()"))
    outcomes: list[str] = []
    await turn(make_sender(on_outcome=outcomes.append))
    assert outcomes == ["dead"] and await states(db) == [("dead", 0, None)]
