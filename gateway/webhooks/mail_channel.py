"""Sends e-mails of events to the people of an organization, by their roles and their choices: each
event once to each person. Who could not be reached is tried again for a day, as webhooks are; an
address that the server refuses for good is given up.

One that is sent twice, since a gateway died before it had written down that it was taken, has the
same Message-ID both times, by which mail servers and programs show it once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.net.mail import Mailer, MailError, MailMessage
from gateway.secret import Cipher
from gateway.tenancy.members.mail_topics import TOPICS, is_wanted
from gateway.webhooks.mail_texts import (
    MAILED,
    MailFacts,
    read_event,
    write_text,
)
from gateway.webhooks.queue import JITTER, AttemptOutcome, DeliveryQueue, Draw, delay_s
from gateway.webhooks.tables import mails
from gateway.wire.admin.webhook_events import ApprovalRequested, WebhookEvent

CIPHER_PURPOSE = "mail-choices"
CONTEXT = b"mail choices"
CHOICES_PATH = "/account/mail"
MAX_DELAY_S = 900.0
"""The server is the operator's own: when it is back, mail is not late by hours."""
MAX_AN_HOUR = 30
"""The most that one person is sent in an hour; the rest waits, for a day at most."""
MAX_RECIPIENTS = 50
"""The most people of an organization who are told of one event."""


class MailRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    user_id: str
    event_id: str
    event_type: str
    state: str
    attempts: int
    due_at: datetime
    expires_at: datetime
    status: int | None
    """The code of the SMTP server's last reply; None: no answer came, or it was taken."""
    failure: str | None
    created_at: datetime
    ended_at: datetime | None


class LeasedMail(msgspec.Struct, frozen=True, kw_only=True):
    """An e-mail with all that its holder needs to send it."""

    id: str
    org_id: str
    receiver_id: str
    """The user's id."""
    body: str
    attempts: int
    email: str
    name: str
    role: str
    choices: dict[str, bool]
    org_name: str

    def __repr__(self) -> str:
        return f"LeasedMail({self.id})"


QUEUE = DeliveryQueue(
    table=mails,
    receivers="users",
    receiver="user_id",
    open="""r.archived_at IS NULL
            AND EXISTS (SELECT FROM orgs o WHERE o.id = d.org_id AND o.archived_at IS NULL)""",
    ready=f"""(SELECT count(*) FROM mail_deliveries s WHERE s.user_id = d.user_id
            AND s.state = 'delivered' AND s.ended_at > now() - interval '1 hour') < {MAX_AN_HOUR}
    """,
    columns="""d.body, d.attempts, r.email, r.name, r.role, r.mail_choices AS choices,
        (SELECT o.name FROM orgs o WHERE o.id = d.org_id) AS org_name""",
    leased=LeasedMail,
    id_prefix="mail_",
)
COLUMNS = [mails.c[name] for name in MailRecord.__struct_fields__]


def select_mails(org_id: str, *, state: str | None = None) -> sa.Select[Any]:
    """Select e-mails to the people of an org, for a page; None: in any state."""
    found = sa.select(*COLUMNS).where(mails.c.org_id == org_id)
    return found if state is None else found.where(mails.c.state == state)


class Person(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    role: str
    choices: dict[str, bool]
    is_operator: bool


_PEOPLE = sa.text("""
    SELECT u.id, u.org_id, u.role, u.mail_choices AS choices, o.is_operator
    FROM users u JOIN orgs o ON o.id = u.org_id
    WHERE u.archived_at IS NULL AND o.archived_at IS NULL
        AND (o.id = ANY(CAST(:orgs AS text[])) OR (o.is_operator AND :operators))
        AND u.role = ANY(CAST(:roles AS text[]))
    ORDER BY u.id
""")
ROLES = sorted({role for rule in TOPICS.values() for role in rule.roles})


async def find_people(
    conn: AsyncConnection, orgs: Iterable[str], *, operators: bool
) -> list[Person]:
    """Find the people of organizations who may be sent e-mail. operators: those of the operator's,
    too."""
    wanted = {"orgs": sorted(set(orgs)), "operators": operators, "roles": ROLES}
    return [Person(**row._mapping) for row in await conn.execute(_PEOPLE, wanted)]


def recipients(event: WebhookEvent, org_id: str, people: Iterable[Person]) -> list[str]:
    """Return the ids of those who are told of an event of an organization."""
    mailed = MAILED.get(event.type)
    if mailed is None or is_callers_own(event.data):
        return []
    for_operators = TOPICS[mailed.topic].for_operators
    found = [
        each.id
        for each in people
        if (each.is_operator if for_operators else each.org_id == org_id)
        and is_wanted(mailed.topic, each.role, each.choices)
    ]
    return found[:MAX_RECIPIENTS]


def is_callers_own(data: object) -> bool:
    """True for a call whose answer the rules leave to whoever calls."""
    return isinstance(data, ApprovalRequested) and data.decider == "caller"


class ChoiceLinks:
    """Makes and reads the links by which somebody chooses their e-mail without signing in."""

    def __init__(self, cipher: Cipher, public_url: str) -> None:
        self._cipher = cipher
        self.base = public_url.rstrip("/")

    def url(self, org_id: str, user_id: str, topic: str | None = None) -> str:
        token = self._cipher.seal_text(f"{org_id} {user_id}".encode(), CONTEXT)
        query = {"token": token} | ({} if topic is None else {"topic": topic})
        return f"{self.base}{CHOICES_PATH}?{urlencode(query)}"

    def read(self, token: str) -> tuple[str, str]:
        """Return the ids of an organization and of its user. Raises: ValueError."""
        org_id, _, user_id = self._cipher.open_text(token, CONTEXT).decode().partition(" ")
        return org_id, user_id


_FACTS = sa.text("""
    SELECT (SELECT name FROM orgs WHERE id = :org) AS organization,
        (SELECT name FROM projects WHERE org_id = :org AND id = :project) AS project,
        (SELECT name FROM api_keys WHERE org_id = :org AND id = :key) AS key,
        (SELECT hard FROM spend_caps WHERE org_id = :org AND id = :cap) AS hard
""")


class MailChannel:
    """Sends what waits by an SMTP server. `db`: of a role that sees every org's rows.
    `wall_clock`: Unix seconds."""

    queue = QUEUE

    def __init__(
        self,
        db: AsyncEngine,
        mailer: Mailer,
        links: ChoiceLinks,
        *,
        on_outcome: Callable[[str], None] = lambda outcome: None,
        wall_clock: Callable[[], float] = time.time,
        draw: Draw = JITTER.uniform,
    ) -> None:
        self._db, self._mailer, self._links = db, mailer, links
        self.on_outcome = on_outcome
        self._wall_clock, self._draw = wall_clock, draw

    async def attempt(self, delivery: LeasedMail) -> AttemptOutcome:
        mailed, data = read_event(delivery.body)
        if not is_wanted(mailed.topic, delivery.role, delivery.choices):
            return AttemptOutcome(status=None, failure="switched off by its reader")
        if is_too_late(data, self._wall_clock()):
            return AttemptOutcome(status=None, failure="too late to be answered")
        async with self._db.connect() as conn:
            row = (await conn.execute(_FACTS, ids_of(data))).one()
        letter = mailed.write(data, MailFacts(**row._mapping))
        who = (delivery.org_id, delivery.receiver_id)
        off = self._links.url(*who, mailed.topic)
        message = MailMessage(
            to=delivery.email,
            subject=letter.subject,
            text=write_text(
                letter,
                reader=delivery.name,
                role=delivery.role,
                organization=delivery.org_name,
                base=self._links.base,
                choices_url=self._links.url(*who),
            ),
            id=delivery.id,
            # RFC 8058: a mail program's own button switches this topic off.
            headers={
                "List-Unsubscribe": f"<{off}>",
                "List-Unsubscribe-Post": "List-Unsubscribe=One-Click",
            },
        )
        try:
            await self._mailer.deliver(message)
        except MailError as error:
            later = delay_s(delivery.attempts, self._draw, max_s=MAX_DELAY_S)
            retry_in_s = None if error.final else later
            return AttemptOutcome(status=error.code, failure=str(error), retry_in_s=retry_in_s)
        return AttemptOutcome(status=None, failure=None)


def is_too_late(data: object, now: float) -> bool:
    return isinstance(data, ApprovalRequested) and data.expires_at.timestamp() <= now


def ids_of(data: Any) -> Mapping[str, str | None]:
    """Return the ids that the data of an event names."""
    scope = getattr(data, "scope", None)
    owner = "" if scope is None else scope.id.partition("/")[0]
    in_project = scope is not None and scope.type in ("project", "model")
    of_key = scope is not None and scope.type in ("key", "key_model")
    return {
        "org": data.organization_id,
        "project": owner if in_project else getattr(data, "project_id", None),
        "key": owner if of_key else None,
        "cap": getattr(data, "cap_id", None),
    }
