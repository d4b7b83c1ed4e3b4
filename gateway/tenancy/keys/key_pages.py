"""Reads API keys as a person looks through them: with whose they are, in which project, and what
caps they have."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.principal import CapPeriod
from gateway.tenancy.errors import NotFound
from gateway.tenancy.keys.keys import ID_FORM, KeyRow, public_columns
from gateway.tenancy.keys.owners import owner_is_active, with_owners
from gateway.tenancy.member_tables import service_accounts, users
from gateway.tenancy.pages import FIRST, Cursor, ends, like, read_page
from gateway.tenancy.tables import api_keys, projects, spend_caps

KeyState = Literal["active", "revoked", "expired"]
STATES: tuple[KeyState, ...] = ("active", "revoked", "expired")


class KeyCap(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    period: CapPeriod
    amount_pico: int
    hard: bool


class KeyPage(msgspec.Struct, frozen=True, kw_only=True):
    """A key, and what is beside it."""

    key: KeyRow
    project_name: str | None
    owner: str | None
    """The e-mail address of its user, or the name of its service account."""
    owner_may: bool
    """False: its owner may no longer use the project, so it is refused."""
    caps: list[KeyCap]


async def list_key_pages(
    conn: AsyncConnection,
    *,
    org_id: str,
    project_id: str | None = None,
    state: KeyState | None = None,
    text: str = "",
    now: datetime,
    cursor: Cursor = FIRST,
) -> tuple[list[KeyPage], bool]:
    """Return a page of keys, and whether there are more. `text`: a part of their name, or the end
    of their secret or id. Raises: InvalidField (limit)."""
    c = api_keys.c
    found = _select(org_id)
    if project_id is not None:
        found = found.where(c.project_id == project_id)
    ended = sa.and_(c.expires_at.is_not(None), c.expires_at <= now)
    if state == "revoked":
        found = found.where(c.revoked_at.is_not(None))
    elif state == "expired":
        found = found.where(c.revoked_at.is_(None), ended)
    elif state == "active":
        found = found.where(c.revoked_at.is_(None), sa.not_(ended))
    if text:
        found = found.where(sa.or_(like(c.name, text), ends(c.id, text), c.last_four == text[-4:]))
    rows, more = await read_page(conn, found, c.id, cursor)
    return [_to_page(row) for row in rows], more


async def get_key_page(conn: AsyncConnection, *, org_id: str, key_id: str) -> KeyPage:
    """Raises: NotFound."""
    row = None
    if ID_FORM.fullmatch(key_id) is not None:
        found = _select(org_id).where(api_keys.c.id == key_id)
        row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("key", "no such key")
    return _to_page(row)


def _select(org_id: str) -> sa.Select[Any]:
    own = spend_caps.c
    cap = sa.func.jsonb_build_object(
        *("id", own.id, "period", own.period),
        *("amount_pico", own.amount_pico, "hard", own.hard),
    )
    caps = sa.select(sa.func.jsonb_agg(cap, type_=JSONB)).where(
        own.org_id == org_id, own.key_id == api_keys.c.id, own.archived_at.is_(None)
    )
    joined = with_owners(api_keys).outerjoin(
        projects,
        sa.and_(projects.c.org_id == api_keys.c.org_id, projects.c.id == api_keys.c.project_id),
    )
    return (
        sa.select(
            *public_columns(),
            projects.c.name.label("project_name"),
            sa.func.coalesce(users.c.email, service_accounts.c.name).label("owner"),
            owner_is_active().label("owner_may"),
            caps.correlate(api_keys).scalar_subquery().label("caps"),
        )
        .select_from(joined)
        .where(api_keys.c.org_id == org_id)
    )


def _to_page(row: sa.Row[Any]) -> KeyPage:
    values = dict(row._mapping)
    beside = {name: values.pop(name) for name in ("project_name", "owner", "owner_may")}
    caps = [
        KeyCap(**{**each, "amount_pico": int(each["amount_pico"])})
        for each in values.pop("caps") or ()
    ]
    return KeyPage(key=KeyRow(**values), caps=caps, **beside)
