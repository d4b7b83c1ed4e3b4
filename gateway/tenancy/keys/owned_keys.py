"""API keys with whose they are, as administrators see them, and what becomes of them when their
owner leaves.

Revoked keys are not shown: for their administrators they are gone, for bills their rows stay.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.tenancy.errors import NotFound
from gateway.tenancy.keys.keys import ADMIN_PREFIX
from gateway.tenancy.keys.owners import owner_is_active, role_of_owner, with_owners
from gateway.tenancy.member_tables import project_members, service_accounts, users
from gateway.tenancy.pages import FIRST, Cursor, read_page
from gateway.tenancy.tables import api_keys

Access = Literal["active", "inactive", "any"]


class KeyOwner(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["user", "service_account"]
    id: str
    name: str
    email: str | None
    role: str
    """The owner's role in the org."""
    project_role: str
    """A user without a membership is `member` by being at home everywhere."""
    created_at: datetime


class OwnedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that was not revoked."""

    id: str
    project_id: str | None
    name: str
    hint: str
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None
    active: bool
    """True if the key's owner may use the project."""
    owner: KeyOwner | None


async def list_project_keys(
    conn: AsyncConnection,
    *,
    org_id: str,
    project_id: str,
    access: Access = "any",
    cursor: Cursor = FIRST,
) -> tuple[list[OwnedKey], bool]:
    """Raises: InvalidField (limit)."""
    listed = _keys(org_id, project_id)
    if access != "any":
        wanted = owner_is_active()
        listed = listed.where(wanted if access == "active" else sa.not_(wanted))
    rows, more = await read_page(conn, listed, api_keys.c.id, cursor)
    return [_to_key(row) for row in rows], more


async def list_admin_keys(
    conn: AsyncConnection, *, org_id: str, cursor: Cursor = FIRST
) -> tuple[list[OwnedKey], bool]:
    """Return the keys of administration, of whatever project. Raises: InvalidField (limit)."""
    rows, more = await read_page(conn, _keys(org_id, None), api_keys.c.id, cursor)
    return [_to_key(row) for row in rows], more


async def get_key(
    conn: AsyncConnection, *, org_id: str, key_id: str, project_id: str | None
) -> OwnedKey:
    """One of a project; without it, one of administration. Raises: NotFound."""
    found = _keys(org_id, project_id).where(api_keys.c.id == key_id)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise _unknown(key_id)
    return _to_key(row)


async def lock_key(
    conn: AsyncConnection, *, org_id: str, key_id: str, project_id: str | None
) -> OwnedKey:
    """Read a key like `get_key`, and lock it: nobody changes it before this commits. Raises:
    NotFound."""
    held = sa.select(api_keys.c.id).where(api_keys.c.org_id == org_id, api_keys.c.id == key_id)
    await conn.execute(held.with_for_update(key_share=True))
    return await get_key(conn, org_id=org_id, key_id=key_id, project_id=project_id)


async def delete_key(
    conn: AsyncConnection, *, org_id: str, key_id: str, project_id: str | None, actor: Actor
) -> None:
    """Revoke a key for ever; its row stays, for bills to name.

    To be announced.
    Raises: NotFound.
    """
    before = await lock_key(conn, org_id=org_id, key_id=key_id, project_id=project_id)
    gone = sa.update(api_keys).where(api_keys.c.org_id == org_id, api_keys.c.id == key_id)
    await conn.execute(gone.values(revoked_at=sa.func.now()))
    await _record_end(conn, org_id, before.id, before.name, before.project_id, actor)


async def revoke_keys_of_user(
    conn: AsyncConnection, *, org_id: str, user_id: str, actor: Actor
) -> None:
    """Revoke all keys of one who leaves."""
    await _revoke_where(conn, org_id, api_keys.c.user_id == user_id, actor)


async def revoke_keys_of_service_account(
    conn: AsyncConnection, *, org_id: str, service_account_id: str, actor: Actor
) -> None:
    """Revoke all keys of a service account that is removed."""
    owned = api_keys.c.service_account_id == service_account_id
    await _revoke_where(conn, org_id, owned, actor)


async def _revoke_where(
    conn: AsyncConnection, org_id: str, condition: sa.ColumnElement[bool], actor: Actor
) -> None:
    gone = sa.update(api_keys).where(api_keys.c.org_id == org_id, api_keys.c.revoked_at.is_(None))
    gone = gone.where(condition)
    columns = (api_keys.c.id, api_keys.c.name, api_keys.c.project_id)
    ended = await conn.execute(gone.values(revoked_at=sa.func.now()).returning(*columns))
    for row in sorted(ended.all()):
        await _record_end(conn, org_id, row.id, row.name, row.project_id, actor)


async def _record_end(
    conn: AsyncConnection,
    org_id: str,
    key_id: str,
    name: str,
    project_id: str | None,
    actor: Actor,
) -> None:
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="api_key.deleted",
        target=key_id,
        before={"name": name, "project_id": project_id},
    )


def _unknown(key_id: str) -> NotFound:
    return NotFound("key_id", f"no key {key_id!r}")


def _keys(org_id: str, project_id: str | None) -> sa.Select[Any]:
    names = ("id", "project_id", "name", "prefix", "last_four", "scopes", "created_at")
    owner_columns = [
        users.c.id.label("user_id"),
        users.c.email.label("user_email"),
        users.c.name.label("user_name"),
        users.c.created_at.label("user_created_at"),
        service_accounts.c.id.label("account_id"),
        service_accounts.c.name.label("account_name"),
        service_accounts.c.created_at.label("account_created_at"),
        role_of_owner().label("owner_role"),
        sa.func.coalesce(
            service_accounts.c.project_role,
            sa.case((project_members.c.removed_at.is_(None), project_members.c.role)),
        ).label("project_role"),
    ]
    found = sa.select(
        *(api_keys.c[name] for name in (*names, "expires_at")),
        api_keys.c.last_used_at,
        owner_is_active().label("active"),
        *owner_columns,
    ).select_from(with_owners(api_keys))
    found = found.where(api_keys.c.org_id == org_id, api_keys.c.revoked_at.is_(None))
    if project_id is None:
        return found.where(api_keys.c.prefix == ADMIN_PREFIX)
    return found.where(api_keys.c.project_id == project_id, api_keys.c.prefix != ADMIN_PREFIX)


def _to_key(row: sa.Row[Any]) -> OwnedKey:
    return OwnedKey(
        id=row.id,
        project_id=row.project_id,
        name=row.name,
        hint=f"{row.prefix}...{row.last_four}",
        scopes=row.scopes,
        created_at=row.created_at,
        expires_at=row.expires_at,
        last_used_at=row.last_used_at,
        active=row.active,
        owner=_to_owner(row),
    )


def _to_owner(row: sa.Row[Any]) -> KeyOwner | None:
    common = {"role": row.owner_role, "project_role": row.project_role or "member"}
    if row.user_id is not None:
        return KeyOwner(
            kind="user",
            id=row.user_id,
            name=row.user_name,
            email=row.user_email,
            created_at=row.user_created_at,
            **common,
        )
    if row.account_id is not None:
        return KeyOwner(
            kind="service_account",
            id=row.account_id,
            name=row.account_name,
            email=None,
            created_at=row.account_created_at,
            **common,
        )
    return None
