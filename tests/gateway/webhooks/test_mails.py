"""From an alert that stands to a person's mailbox: once, whatever the SMTP server does and whoever
dies on the way, and never to who does not want it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from bench.tools.ports import free_port
from gateway.audit.log import COMMAND_LINE
from gateway.db import tenant
from gateway.ids import uuid7
from gateway.net.mail import Mailer, MailServer
from gateway.secret import Cipher
from gateway.tenancy.member_tables import ROLES
from gateway.tenancy.members.mail_topics import choose_mail
from gateway.tenancy.members.users import User, archive_user, create_user
from gateway.tenancy.orgs import create_org
from gateway.webhooks.mail_channel import CIPHER_PURPOSE, MAX_AN_HOUR, ChoiceLinks, MailChannel
from gateway.webhooks.sender import Sender
from tests.gateway.net.smtp import REFUSED, Inbox, running_inbox
from tests.gateway.webhooks.conftest import SECRET, rows, turn

ROOT = Path(__file__).resolve().parents[3]
BASE = "https://gateway.example.com"
USD = 10**12
OPEN = "gateway.example.com/account/mail?token="


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with running_inbox() as inbox:
        yield inbox


@pytest.fixture
async def owner(db: AsyncEngine, org_id: str) -> User:
    return await join(db, org_id, "owner")


def links() -> ChoiceLinks:
    return ChoiceLinks(Cipher(SECRET, CIPHER_PURPOSE), BASE)


MakeSender = Callable[..., Sender]


@pytest.fixture
async def make_sender(system_db: AsyncEngine) -> AsyncIterator[MakeSender]:
    made: list[Sender] = []

    def make(port: int, *, lease_s: float = 60.0, **options: Any) -> Sender:
        server = MailServer(
            host="127.0.0.1",
            port=port,
            tls="none",
            sender="Tollgate <gateway@example.com>",
            user="gateway",
            password="opens the door",
        )
        mailer = Mailer(server, at_once=16)
        channel = MailChannel(system_db, mailer, links(), draw=lambda low, high: 1.0, **options)
        made.append(Sender(system_db, [channel], sends_mail=True, lease_s=lease_s))
        return made[-1]

    yield make
    for sender in made:
        await sender.close()


async def join(db: AsyncEngine, org_id: str, role: str, name: str | None = None) -> User:
    async with tenant(db, org_id) as conn:
        return await create_user(
            conn,
            org_id=org_id,
            email=f"{name or role}@example.com",
            name=(name or role).title(),
            role=role,
            actor=COMMAND_LINE,
        )


ALERT = sa.text("""
    INSERT INTO alerts (id, org_id, scope, scope_id, measure, cap_id, period, period_start,
        threshold, ceiling, used, reason)
    VALUES (:id, :org, 'org', :org, 'spend', :cap, 'month', '2026-11-01', 80,
        :ceiling, :used, 'spent')
""")


async def spend(db: AsyncEngine, org_id: str, number: int = 1) -> None:
    """So many budgets of an organization are spent by 80 percent."""
    async with db.begin() as conn:
        for _ in range(number):
            id_ = f"alert_{uuid7().hex}"
            values = {"id": id_, "org": org_id, "cap": f"cap_{id_}"}
            await conn.execute(ALERT, {**values, "ceiling": 250 * USD, "used": 200 * USD})


async def states(db: AsyncEngine) -> list[tuple[str, int, int | None]]:
    query = "SELECT state, attempts, status FROM mail_deliveries ORDER BY user_id, event_id"
    return [tuple(row) for row in await rows(db, query)]


async def hurry(db: AsyncEngine) -> None:
    async with db.begin() as conn:
        await conn.execute(sa.text("UPDATE mail_deliveries SET due_at = now()"))


async def test_people_are_told_by_their_roles(
    db: AsyncEngine, org_id: str, inbox: Inbox, make_sender: MakeSender
) -> None:
    people = {role: await join(db, org_id, role) for role in ROLES}
    left = await join(db, org_id, "owner", "left")
    async with tenant(db, org_id) as conn:
        await archive_user(conn, org_id=org_id, user_id=left.id, actor=COMMAND_LINE)
    async with db.begin() as conn:
        other = await create_org(conn, name="other", is_operator=False, actor=COMMAND_LINE)
    await join(db, other.id, "owner", "stranger")
    await spend(db, org_id)
    outcomes: list[str] = []
    await turn(make_sender(inbox.port, on_outcome=outcomes.append))
    told = {"owner", "admin", "billing"}
    assert {each["to"] for each in inbox.received} == {people[role].email for role in told}
    assert outcomes == ["delivered"] * 3 and len(inbox.received) == 3
    assert {tuple(each) for each in inbox.recipients} == {(f"{role}@example.com",) for role in told}


async def test_a_mail_says_how_much_it_is_and_what_to_do(
    db: AsyncEngine, org_id: str, owner: User, inbox: Inbox, make_sender: MakeSender
) -> None:
    await spend(db, org_id)
    await turn(make_sender(inbox.port))
    [got] = inbox.received
    assert got["subject"] == "80% of the monthly budget of the organization “acme” is spent"
    assert got["from"] == "Tollgate <gateway@example.com>"
    text = got.get_content()
    link = links().read(text.partition("token=")[2].strip())
    assert link == (org_id, owner.id)
    assert text.partition(f"{BASE}/account/mail?token=")[0].splitlines() == [
        "Hello Owner,",
        "",
        "The organization “acme” has spent $200.00 of its monthly budget of $250.00 (November"
        " 2026).",
        "",
        "See what was spent, and raise or remove the budget:",
        "https://gateway.example.com/console",
        "",
        "-- ",
        "You are sent this as owner of “acme” at https://gateway.example.com.",
        "Choose what you are sent: ",
    ]
    off = got["list-unsubscribe"]
    assert off.startswith(f"<{BASE}/account/mail?token=") and off.endswith("&topic=budgets>")
    assert got["list-unsubscribe-post"] == "List-Unsubscribe=One-Click"


async def test_who_switched_it_off_is_sent_none_even_of_what_waits(
    db: AsyncEngine, org_id: str, owner: User, inbox: Inbox, make_sender: MakeSender
) -> None:
    admin = await join(db, org_id, "admin")

    async def choose(user: User, **choices: bool) -> None:
        where = {"org_id": org_id, "user_id": user.id, "actor": COMMAND_LINE}
        async with tenant(db, org_id) as conn:
            await choose_mail(conn, choices=choices, **where)  # type: ignore[arg-type]

    await choose(admin, budgets=False)
    await spend(db, org_id)
    sender = make_sender(free_port())
    await turn(sender)
    assert await states(db) == [("pending", 1, None)], "the admin is sent none"
    await choose(owner, budgets=False)
    await hurry(db)
    await turn(make_sender(inbox.port))
    assert await states(db) == [("dead", 2, None)] and inbox.received == []
    [row] = await rows(db, "SELECT failure FROM mail_deliveries")
    assert row.failure == "switched off by its reader"


async def test_two_gateways_send_each_mail_once(
    db: AsyncEngine, org_id: str, owner: User, inbox: Inbox, make_sender: MakeSender
) -> None:
    for name in ("ann", "ben", "cem"):
        await join(db, org_id, "billing", name)
    await spend(db, org_id, 6)
    senders = [make_sender(inbox.port) for _ in range(3)]
    async with asyncio.timeout(60):
        while len(inbox.received) < 24:
            await asyncio.gather(*map(turn, senders))
    await asyncio.gather(*map(turn, senders))
    assert len(inbox.received) == 24
    assert len({(each["to"], each["message-id"]) for each in inbox.received}) == 24


async def test_mail_waits_for_a_server_that_is_down(
    db: AsyncEngine,
    org_id: str,
    owner: User,
    make_sender: MakeSender,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await spend(db, org_id)
    port = free_port()
    outcomes: list[str] = []
    sender = make_sender(port, on_outcome=outcomes.append)
    for _ in range(3):
        await turn(sender)
        await turn(sender)  # it is not due yet
        await hurry(db)
    assert outcomes == ["failed"] * 3 and await states(db) == [("pending", 3, None)]
    with running_inbox(port) as inbox:
        inbox.replies = ["451 try again later", "421 busy"]
        for _ in range(2):
            await turn(sender)
            await hurry(db)
        assert [state[0] for state in await states(db)] == ["pending"]
        await turn(sender)
        assert len(inbox.received) == 1 and outcomes[-1] == "delivered"
    said = "\n".join(each.getMessage() for each in caplog.records if each.name != "mail.log")
    for secret in ("opens the door", owner.email, "token="):
        assert secret not in said


@pytest.mark.parametrize("reply", ["554 spam", "552 too much"])
async def test_what_the_server_refuses_for_good_is_given_up(
    db: AsyncEngine, org_id: str, owner: User, inbox: Inbox, make_sender: MakeSender, reply: str
) -> None:
    await spend(db, org_id)
    inbox.replies = [reply]
    outcomes: list[str] = []
    sender = make_sender(inbox.port, on_outcome=outcomes.append)
    await turn(sender)
    await hurry(db)
    await turn(sender)
    assert outcomes == ["dead"] and await states(db) == [("dead", 1, int(reply[:3]))]
    [row] = await rows(db, "SELECT failure FROM mail_deliveries")
    assert row.failure == "SMTPDataError"


async def test_an_address_that_is_none_is_given_up_and_a_wrong_login_is_not(
    db: AsyncEngine, org_id: str, owner: User, inbox: Inbox, make_sender: MakeSender
) -> None:
    """The operator puts a login right; nobody makes an address of what is none."""
    addresses = "UPDATE users SET email = :email WHERE id = :id"
    for email in (REFUSED, "two,of@example.com", "ann@example.com>\r\nRCPT TO:<eve@example.com"):
        await spend(db, org_id)
        async with db.begin() as conn:
            await conn.execute(sa.text(addresses), {"email": email, "id": owner.id})
        await turn(make_sender(inbox.port))
    assert await states(db) == [("dead", 1, 550), ("dead", 1, None), ("dead", 1, None)]
    async with db.begin() as conn:
        await conn.execute(sa.text(addresses), {"email": "ann@example.com", "id": owner.id})
    await spend(db, org_id)
    inbox.accepts_logins = False
    sender = make_sender(inbox.port)
    await turn(sender)
    assert (await states(db))[-1] == ("pending", 1, 535) and inbox.recipients == []
    inbox.accepts_logins = True
    await hurry(db)
    await turn(sender)
    assert inbox.recipients == [["ann@example.com"]]


async def test_a_flood_is_sent_a_part_an_hour_and_holds_up_nobody(
    db: AsyncEngine, org_id: str, owner: User, inbox: Inbox, make_sender: MakeSender
) -> None:
    async with db.begin() as conn:
        other = await create_org(conn, name="other", is_operator=False, actor=COMMAND_LINE)
    await join(db, other.id, "owner", "quiet")
    await spend(db, org_id, 300)
    await spend(db, other.id)
    sender = make_sender(inbox.port)
    await turn(sender)
    assert {each["to"] for each in inbox.received} == {owner.email, "quiet@example.com"}
    for _ in range(MAX_AN_HOUR + 5):
        await turn(sender)
    assert len(inbox.received) == MAX_AN_HOUR + 1
    async with db.begin() as conn:
        hour = "UPDATE mail_deliveries SET ended_at = ended_at - interval '1 hour'"
        await conn.execute(sa.text(hour))
    await turn(sender)
    assert len(inbox.received) == MAX_AN_HOUR + 2
    assert len({each["message-id"] for each in inbox.received}) == MAX_AN_HOUR + 2


KILLED = """
import asyncio, sys
from gateway.db import ROLE_SYSTEM, create_engine
from gateway.net.mail import Mailer, MailServer
from gateway.webhooks.mail_channel import MailChannel
from gateway.webhooks.sender import Sender
from tests.gateway.webhooks.test_mails import links

async def main():
    db = create_engine(sys.argv[1], role=ROLE_SYSTEM)
    server = MailServer(host="127.0.0.1", port=int(sys.argv[2]), tls="none", sender="g@example.com")
    channel = MailChannel(db, Mailer(server), links())
    sender = Sender(db, [channel], sends_mail=True, lease_s=2.0)
    await sender.poll()
    await sender.drain()

asyncio.run(main())
"""


async def test_a_gateway_killed_before_it_wrote_down_sends_twice_under_one_id(
    db: AsyncEngine,
    postgres_url: str,
    org_id: str,
    owner: User,
    inbox: Inbox,
    make_sender: MakeSender,
) -> None:
    """At least once: what gets it tells them by their Message-ID."""
    await spend(db, org_id)
    sender, loop = make_sender(inbox.port), asyncio.get_running_loop()
    async with db.connect() as conn:

        async def lock() -> None:
            # From here on the outcome cannot be committed.
            await conn.execute(sa.text("SELECT id FROM mail_deliveries FOR UPDATE"))

        async def lock_here() -> None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(lock(), loop))

        inbox.before_reply = lock_here
        killed = subprocess.Popen(
            [sys.executable, "-c", KILLED, postgres_url, str(inbox.port)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            async with asyncio.timeout(60):
                while not await rows(db, "SELECT 1 FROM pg_locks WHERE NOT granted"):
                    await asyncio.sleep(0.02)
        finally:
            killed.send_signal(signal.SIGKILL)
            await asyncio.to_thread(killed.wait)
        inbox.before_reply = None
        await conn.rollback()
    assert await states(db) == [("pending", 1, None)] and len(inbox.received) == 1
    async with asyncio.timeout(30):
        while len(inbox.received) < 2:
            await turn(sender)
            await asyncio.sleep(0.1)
    first, second = inbox.received
    assert first["message-id"] == second["message-id"]
    assert await states(db) == [("delivered", 2, None)]


async def test_the_operators_people_are_told_whose_payment_to_take(
    db: AsyncEngine, org_id: str, owner: User, inbox: Inbox, make_sender: MakeSender
) -> None:
    async with db.begin() as conn:
        house = await create_org(conn, name="house", is_operator=True, actor=COMMAND_LINE)
    await join(db, house.id, "billing", "cashier")
    await join(db, house.id, "admin", "engineer")
    asked = sa.text("""
        INSERT INTO top_ups (id, org_id, amount_pico, left_pico, state, expires_at)
        VALUES ('topup_1', :org, :amount, 0, 'requested', now() + interval '3 days')
    """)
    async with db.begin() as conn:
        await conn.execute(asked, {"org": org_id, "amount": 100 * USD})
    await turn(make_sender(inbox.port))
    [got] = inbox.received
    assert got["to"] == "cashier@example.com"
    assert got["subject"] == "“acme” asks for a top-up of $100.00"
    assert "as billing of “house”" in got.get_content()
