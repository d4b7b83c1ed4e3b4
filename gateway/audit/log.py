"""`record`: one more entry of an org's audit log, in the transaction that makes the change;
`record_all`: many.

Knows no HTTP; `routes.access.actor_of` says who asked.

How to call it:

    async with tenant(db, org_id) as conn:
        ...                                      # the change
        await record(
            conn, org_id=org_id, actor=actor, action="project.created", target=project.id,
            after={"name": project.name},
        )

- Last in the transaction, behind the books' lock, too: it locks the head of the org's chain until
  the commit, so what is locked after it can deadlock with somebody who locks the other way round.
- What an operator does in another org stands in both logs: `record_for_both`.
- What happens to an installation-wide thing (a plan, a signing key) stands in the operator's org.
- `action` is OpenAI's event type where there is one (`api_key.created`, `user.updated`), else one
  in their manner (`oauth_client.created`). `target` is the row's id.
- `before` and `after`: the fields that the change is about, as people may see them. Structs,
  datetimes, sets are fine. A key such as `secret`, `password`, `token` or `..._hash` is refused,
  and so is a value that looks like a credential.
- `project_id`: the project it happened in; by itself the target, where that is a project, or the
  `project_id` of `after` or `before`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.chain import AuditEntry, canonical, digest
from gateway.audit.errors import CredentialInAudit, SecretInAudit
from gateway.audit.tables import entries, heads
from gateway.credential_forms import CREDENTIAL
from gateway.ids import uuid7

MAX_STATE_BYTES = 256 * 1024
"""`before` and `after` have at most this size as JSON; requests were bounded before."""
MAX_AT_ONCE = 1000
ACTION_FORM = re.compile(r"[a-z_]{1,40}(?:\.[a-z_]{1,40}){1,3}", re.ASCII)
SECRET_KEY = re.compile(
    r"(?:.*_)?(?:secret|password|passphrase|token|hash|pepper|assertion|code_verifier|cookie"
    r"|authorization|private_key)",
    re.ASCII | re.IGNORECASE,
)
PROJECT_PREFIX = "proj_"

ActorKind = Literal["user", "service_account", "api_key", "client", "system"]


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """The actor of a change: the credential that was shown, and whom it acts for.

    `user`: somebody who is logged in. `api_key`, `client`: the key or OAuth client, `on_behalf_of`
    the user or service account whose it is. `system`: the command line, the first start.
    """

    kind: ActorKind
    id: str
    ip: str | None = None
    request_id: str | None = None
    on_behalf_of: str | None = None
    still_may: Callable[[AsyncConnection], Awaitable[None]] | None = None
    """Asked behind the lock of the chain; raises where another request has taken over."""


COMMAND_LINE = Actor(kind="system", id="cli")
"""The actor of changes that somebody makes with `tollgate` on the machine."""
FIRST_START = Actor(kind="system", id="bootstrap")
SETTINGS = Actor(kind="system", id="settings")
"""The actor of changes that the settings file causes at a start."""
PLANNER = Actor(kind="system", id="planner")
"""Decisions how many engines a model has (`gateway.fleet.planner`)."""
ROTATION = Actor(kind="system", id="rotation")
"""Signing keys' own age."""


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One of many entries for `record_all`, with the arguments of `record`."""

    actor: Actor
    action: str
    target: str
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None
    project_id: str | None = None


async def record(
    conn: AsyncConnection,
    *,
    org_id: str,
    actor: Actor,
    action: str,
    target: str,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    project_id: str | None = None,
) -> None:
    """Record one change; it stands when the transaction commits, at the head of the chain.

    Raises: SecretInAudit, ValueError (too large); LookupError (no such org is visible); what
    `actor.still_may` raises.
    """
    event = AuditRecord(
        actor=actor,
        action=action,
        target=target,
        before=before,
        after=after,
        project_id=project_id,
    )
    await record_all(conn, org_id=org_id, events=(event,))


async def record_all(conn: AsyncConnection, *, org_id: str, events: Sequence[AuditRecord]) -> None:
    """Record up to MAX_AT_ONCE changes, in their order, at one moment: in three trips to Postgres,
    however many they are.

    Raises: as `record`, for any of them.
    """
    assert len(events) <= MAX_AT_ONCE, f"{len(events)} at once"
    if not events:
        return
    states = [(event, _state(event.before), _state(event.after)) for event in events]
    for event in events:
        assert ACTION_FORM.fullmatch(event.action), f"{event.action!r} is no event type"
    locked = sa.select(heads.c.sequence, heads.c.hash).where(heads.c.org_id == org_id)
    head = locked.with_for_update().cte("head").prefix_with("MATERIALIZED")
    # The clock is read behind the lock, so that time never runs backwards along a chain.
    read = await conn.execute(sa.select(head, sa.func.clock_timestamp().label("now")))
    head_row = read.one_or_none()
    if head_row is None:
        raise LookupError(f"no audit log of {org_id!r}")
    rows: list[dict[str, Any]] = []
    sequence, previous = head_row.sequence, head_row.hash
    for event, before_text, after_text in states:
        actor = event.actor
        if actor.still_may is not None:
            await actor.still_may(conn)
        sequence += 1
        entry = AuditEntry(
            org_id=org_id,
            sequence=sequence,
            id=f"audit_log-{uuid7().hex}",
            occurred_at=head_row.now,
            action=event.action,
            target=event.target,
            project_id=event.project_id or _project_of(event.target, event.after, event.before),
            actor_kind=actor.kind,
            actor_id=actor.id,
            on_behalf_of=actor.on_behalf_of,
            ip=actor.ip,
            request_id=actor.request_id,
            before=before_text,
            after=after_text,
            previous=previous,
        )
        previous = digest(entry)
        rows.append({**msgspec.structs.asdict(entry), "hash": previous})
    await conn.execute(sa.insert(entries), rows)
    # The head goes by one at a time, or Postgres refuses it; in one trip all the same.
    advanced = sa.update(heads).where(heads.c.org_id == sa.bindparam("org"))
    steps = [{"org": org_id, "sequence": row["sequence"], "hash": row["hash"]} for row in rows]
    await conn.execute(advanced, steps)


async def record_for_both(
    conn: AsyncConnection,
    *,
    org_id: str,
    operator_org: str | None,
    project_id: str | None = None,
    **entry: Any,
) -> None:
    """Record a change in the org's log and in that of the operator whose credential asks, if it is
    another org's.

    The smaller id first: of all who do it nobody waits in a circle, be both of them operators.
    `project_id` stands in the org's own alone; `entry` and what it raises: as `record`.
    """
    for log_org in sorted({org_id, operator_org or org_id}):
        own = project_id if log_org == org_id else None
        await record(conn, org_id=log_org, project_id=own, **entry)


def _project_of(
    target: str, after: Mapping[str, Any] | None, before: Mapping[str, Any] | None
) -> str | None:
    if target.startswith(PROJECT_PREFIX):
        return target
    for state in (after or {}, before or {}):
        found = state.get("project_id")
        if isinstance(found, str):
            return found
    return None


def _state(fields: Mapping[str, Any] | None) -> str | None:
    if fields is None:
        return None
    plain = msgspec.to_builtins(dict(fields), order="sorted")
    refuse_secrets(plain)
    text = canonical(plain).decode()
    if len(text) > MAX_STATE_BYTES:
        raise ValueError(f"more than {MAX_STATE_BYTES} bytes of state")
    return text


def refuse_secrets(value: Any, under: str = "") -> None:
    """Raises: SecretInAudit."""
    if isinstance(value, str) and CREDENTIAL.search(value):
        raise CredentialInAudit(under or "body")
    if isinstance(value, list):
        for each in value:
            refuse_secrets(each, under)
    if isinstance(value, dict):
        for key, each in value.items():
            if SECRET_KEY.fullmatch(key) and each is not None and not isinstance(each, bool):
                raise SecretInAudit(f"{key} must not be recorded")
            refuse_secrets(each, key)
