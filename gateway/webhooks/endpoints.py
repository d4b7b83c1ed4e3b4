"""Manages webhook endpoints of an organization: where its events are sent, and under which secret.
A secret must come back to sign, so it is stored encrypted, bound to its row; people see it once.
During a rotation's grace both secrets sign. Knows no HTTP."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.ids import uuid7
from gateway.net.egress_targets import Forbidden, parse_target
from gateway.secret import Cipher
from gateway.tenancy.changes import unchecked
from gateway.tenancy.errors import InvalidField, NotFound, ReadOnly
from gateway.webhooks.standard_webhooks import new_secret
from gateway.webhooks.tables import deliveries, endpoints

CIPHER_PURPOSE = "webhook-endpoint-secret"
MAX_ENDPOINTS_PER_ORG = 50
"""Live ones: so many deliveries one event can make."""
MAX_GRACE_S = 7 * 86_400


class EndpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    url: str
    description: str | None
    event_types: list[str]
    older_secret_expires_at: datetime | None
    """Until then the secret before this one signs, too."""
    settings_name: str | None
    """The name that it has in the settings, which it follows; None: people made it."""
    version: int
    created_at: datetime
    disabled_at: datetime | None
    """Nothing is sent: somebody said so, or its receiver answered 410."""
    archived_at: datetime | None


class EndpointOnce(msgspec.Struct, frozen=True):
    endpoint: EndpointRecord
    secret: str
    """The secret, which is shown only this once."""

    def __repr__(self) -> str:
        return f"EndpointOnce({self.endpoint.id})"


COLUMNS = [endpoints.c[name] for name in EndpointRecord.__struct_fields__]
Check = Callable[[EndpointRecord], None]
"""Checks the locked row before it is changed. Raises: whatever forbids the change."""


async def create_endpoint(
    conn: AsyncConnection,
    cipher: Cipher,
    *,
    org_id: str,
    url: str,
    description: str | None,
    event_types: Sequence[str],
    actor: Actor,
    allow_loopback: bool = False,
) -> EndpointOnce:
    """Create an endpoint. `event_types` are known ones. Raises: InvalidField."""
    check_url(url, allow_loopback=allow_loopback)
    check_description(description)
    live = sa.select(sa.func.count()).select_from(endpoints)
    live = live.where(endpoints.c.org_id == org_id, endpoints.c.archived_at.is_(None))
    if (await conn.scalar(live) or 0) >= MAX_ENDPOINTS_PER_ORG:
        raise InvalidField("url", f"an organization has at most {MAX_ENDPOINTS_PER_ORG} endpoints")
    endpoint_id, secret = f"whe_{uuid7().hex}", new_secret()
    sealed = cipher.seal(secret.encode(), endpoint_id.encode())
    row = {
        "id": endpoint_id,
        "org_id": org_id,
        "url": url,
        "description": description,
        "event_types": sorted(set(event_types)),
        "secret_sealed": sealed.data,
        "secret_id": sealed.secret_id,
    }
    added = sa.insert(endpoints).values(**row).returning(*COLUMNS)
    made = EndpointRecord(**(await conn.execute(added)).one()._mapping)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="webhook_endpoint.created",
        target=made.id,
        after=seen(made),
    )
    return EndpointOnce(made, secret)


async def get_endpoint(conn: AsyncConnection, *, org_id: str, endpoint_id: str) -> EndpointRecord:
    """Return a live or an archived endpoint. Raises: NotFound."""
    return await _find(conn, org_id, endpoint_id)


def select_endpoints(org_id: str, *, archived: bool = False) -> sa.Select[Any]:
    """Select the endpoints of an org, for a page; archived: those too."""
    listed = sa.select(*COLUMNS).where(endpoints.c.org_id == org_id)
    return listed if archived else listed.where(endpoints.c.archived_at.is_(None))


async def update_endpoint(
    conn: AsyncConnection,
    *,
    org_id: str,
    endpoint_id: str,
    fields: Mapping[str, Any],
    actor: Actor,
    check: Check = unchecked,
    allow_loopback: bool = False,
) -> EndpointRecord:
    """Change an endpoint. `fields`: of url, description, event_types, enabled. Raises: NotFound,
    InvalidField, ReadOnly, what `check` raises."""
    before = await _hold(conn, org_id, endpoint_id, check)
    wanted = dict(fields)
    if "url" in wanted:
        check_url(wanted["url"], allow_loopback=allow_loopback)
    check_description(wanted.get("description"))
    if "event_types" in wanted:
        wanted["event_types"] = sorted(set(wanted["event_types"]))
    enabled = wanted.pop("enabled", before.disabled_at is None)
    changed = {key: value for key, value in wanted.items() if getattr(before, key) != value}
    if enabled != (before.disabled_at is None):
        changed["disabled_at"] = None if enabled else sa.func.now()
    if not changed:
        return before
    return await change_endpoint(conn, before, changed, "webhook_endpoint.updated", actor)


async def rotate_secret(
    conn: AsyncConnection,
    cipher: Cipher,
    *,
    org_id: str,
    endpoint_id: str,
    grace_s: int,
    actor: Actor,
    check: Check = unchecked,
) -> EndpointOnce:
    """Make a new secret; the one before signs beside it for `grace_s` more. Raises: NotFound,
    InvalidField, ReadOnly, what `check` raises."""
    before = await _hold(conn, org_id, endpoint_id, check)
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise InvalidField("grace_s", f"must be 0 to {MAX_GRACE_S}")
    secret = new_secret()
    sealed = cipher.seal(secret.encode(), endpoint_id.encode())
    values: dict[str, Any] = {"secret_sealed": sealed.data, "secret_id": sealed.secret_id}
    values |= dict.fromkeys(
        ("older_secret_sealed", "older_secret_id", "older_secret_expires_at"), None
    )
    if grace_s:
        values["older_secret_sealed"] = endpoints.c.secret_sealed
        values["older_secret_id"] = endpoints.c.secret_id
        values["older_secret_expires_at"] = sa.func.now() + sa.func.make_interval(
            0, 0, 0, 0, 0, 0, grace_s
        )
    after = await change_endpoint(conn, before, values, "webhook_endpoint.secret_rotated", actor)
    return EndpointOnce(after, secret)


async def archive_endpoint(
    conn: AsyncConnection,
    *,
    org_id: str,
    endpoint_id: str,
    actor: Actor,
    check: Check = unchecked,
) -> EndpointRecord:
    """Archive an endpoint: nothing is sent to it from now on, not even what waits. Idempotent.
    Raises: NotFound, what `check` raises."""
    known = await _find(conn, org_id, endpoint_id, lock=True)
    check(known)
    if known.archived_at is not None:
        return known
    _refuse_of_settings(known)
    return await end_endpoint(conn, known, actor)


async def end_endpoint(
    conn: AsyncConnection, known: EndpointRecord, actor: Actor
) -> EndpointRecord:
    """Archive a locked endpoint."""
    org_id, endpoint_id = known.org_id, known.id
    waiting = sa.update(deliveries).where(
        deliveries.c.org_id == org_id,
        deliveries.c.endpoint_id == endpoint_id,
        deliveries.c.state == "pending",
    )
    ended = {"state": "dead", "failure": "endpoint archived", "ended_at": sa.func.now()}
    await conn.execute(waiting.values(**ended))
    values = {"archived_at": sa.func.now()}
    return await change_endpoint(conn, known, values, "webhook_endpoint.archived", actor)


async def disable_endpoint(
    conn: AsyncConnection, *, org_id: str, endpoint_id: str, actor: Actor
) -> None:
    """Send it nothing until somebody enables it. Raises: NotFound."""
    before = await _find(conn, org_id, endpoint_id, lock=True)
    if before.disabled_at is None and before.archived_at is None:
        disabled = {"disabled_at": sa.func.now()}
        await change_endpoint(conn, before, disabled, "webhook_endpoint.disabled", actor)


def check_url(url: str, *, allow_loopback: bool) -> None:
    """Refuse a URL that can never be sent to; where its name leads is checked at each attempt.
    Raises: InvalidField."""
    try:
        parse_target(url, allow_loopback=allow_loopback)
    except Forbidden as error:
        raise InvalidField(
            "url", f"cannot be sent to: {error}", detail="cannot be sent to"
        ) from None


def check_description(description: str | None) -> None:
    """Raises: InvalidField."""
    if any(unicodedata.category(c)[0] == "C" for c in description or ""):
        raise InvalidField("description", "must be printable")


async def _find(
    conn: AsyncConnection, org_id: str, endpoint_id: str, *, lock: bool = False
) -> EndpointRecord:
    """Raises: NotFound."""
    found = sa.select(*COLUMNS).where(endpoints.c.id == endpoint_id, endpoints.c.org_id == org_id)
    row = (await conn.execute(found.with_for_update() if lock else found)).one_or_none()
    if row is None:
        raise NotFound("endpoint_id", f"no webhook endpoint {endpoint_id!r}")
    return EndpointRecord(**row._mapping)


async def _hold(
    conn: AsyncConnection, org_id: str, endpoint_id: str, check: Check
) -> EndpointRecord:
    """Return an endpoint under its lock, to be changed. Raises: NotFound, ReadOnly, what `check`
    raises."""
    found = await _find(conn, org_id, endpoint_id, lock=True)
    check(found)
    if found.archived_at is not None:
        raise ReadOnly("endpoint_id", "an archived endpoint cannot be changed")
    _refuse_of_settings(found)
    return found


def _refuse_of_settings(endpoint: EndpointRecord) -> None:
    """Raises: ReadOnly."""
    if endpoint.settings_name is not None:
        raise ReadOnly(
            "endpoint_id", f"it follows the settings ([[webhook]] {endpoint.settings_name})"
        )


async def change_endpoint(
    conn: AsyncConnection,
    before: EndpointRecord,
    values: Mapping[str, Any],
    action: str,
    actor: Actor,
) -> EndpointRecord:
    """Change a locked endpoint, and record it."""
    changed = sa.update(endpoints).where(
        endpoints.c.id == before.id, endpoints.c.org_id == before.org_id
    )
    changed = changed.values(**values, version=endpoints.c.version + 1).returning(*COLUMNS)
    after = EndpointRecord(**(await conn.execute(changed)).one()._mapping)
    await record(
        conn,
        org_id=before.org_id,
        actor=actor,
        action=action,
        target=before.id,
        before=seen(before),
        after=seen(after),
    )
    return after


def seen(endpoint: EndpointRecord) -> dict[str, Any]:
    """Return what the audit log shows of an endpoint."""
    fields = ("url", "description", "event_types", "disabled_at", "archived_at", "version")
    return {name: getattr(endpoint, name) for name in fields}
