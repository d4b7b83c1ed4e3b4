"""Service accounts of a project: whose API keys are a program's and nobody's in person.

`project_role` is what OpenAI calls its role in the project; with `none` its keys do not work.
`role` is what its credentials may do at most, as a user's.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.ids import uuid7
from gateway.principal import Role
from gateway.tenancy.errors import NotFound
from gateway.tenancy.keys.owned_keys import revoke_keys_of_service_account
from gateway.tenancy.member_tables import PROJECT_ROLES, check_role, service_accounts
from gateway.tenancy.pages import FIRST, Cursor, read_page
from gateway.tenancy.projects import lock_project
from gateway.tenancy.tables import check_name

DEFAULT_ROLE: Role = "developer"


class ServiceAccount(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    project_id: str
    name: str
    role: Role
    project_role: Literal["owner", "member", "none"]
    created_at: datetime
    archived_at: datetime | None


async def create_service_account(
    conn: AsyncConnection,
    *,
    org_id: str,
    project_id: str,
    name: str,
    actor: Actor,
    project_role: Literal["member", "none"] = "member",
) -> ServiceAccount:
    """Raises: InvalidField, NotFound (project), ArchivedError."""
    await lock_project(conn, org_id=org_id, project_id=project_id)
    row = {
        "id": f"svc_acct_{uuid7().hex}",
        "org_id": org_id,
        "project_id": project_id,
        "name": check_name(name),
        "role": DEFAULT_ROLE,
        "project_role": project_role,
    }
    added = sa.insert(service_accounts).values(**row).returning(service_accounts)
    made = ServiceAccount(**(await conn.execute(added)).one()._mapping)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="service_account.created",
        target=made.id,
        after={"project_id": project_id, "name": made.name, "role": project_role},
    )
    return made


async def get_service_account(
    conn: AsyncConnection, *, org_id: str, project_id: str, service_account_id: str
) -> ServiceAccount:
    """A live one. Raises: NotFound."""
    return await _read(conn, _live(org_id, project_id), service_account_id)


async def list_service_accounts(
    conn: AsyncConnection, *, org_id: str, project_id: str, cursor: Cursor = FIRST
) -> tuple[list[ServiceAccount], bool]:
    """Return live service accounts. Raises: InvalidField (limit)."""
    listed = _live(org_id, project_id)
    rows, more = await read_page(conn, listed, service_accounts.c.id, cursor)
    return [ServiceAccount(**row._mapping) for row in rows], more


async def update_service_account(
    conn: AsyncConnection,
    *,
    org_id: str,
    project_id: str,
    service_account_id: str,
    actor: Actor,
    name: str | None = None,
    project_role: str | None = None,
) -> ServiceAccount:
    """Change what is not None. To be announced: with its first role its keys begin to work.

    Raises: InvalidField, NotFound, ArchivedError.
    """
    wanted: dict[str, str] = {}
    if name is not None:
        wanted["name"] = check_name(name)
    if project_role is not None:
        wanted["project_role"] = check_role(project_role, PROJECT_ROLES)
    before = await lock_service_account(
        conn, org_id=org_id, project_id=project_id, service_account_id=service_account_id
    )
    wanted = {key: value for key, value in wanted.items() if getattr(before, key) != value}
    if not wanted:
        return before
    changed = sa.update(service_accounts).where(service_accounts.c.id == service_account_id)
    changed = changed.where(service_accounts.c.org_id == org_id).values(**wanted)
    made = (await conn.execute(changed.returning(service_accounts))).one()
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="service_account.updated",
        target=service_account_id,
        before={"project_id": project_id} | {key: getattr(before, key) for key in wanted},
        after={"project_id": project_id, **wanted},
    )
    return ServiceAccount(**made._mapping)


async def archive_service_account(
    conn: AsyncConnection, *, org_id: str, project_id: str, service_account_id: str, actor: Actor
) -> None:
    """Archive a service account with its keys, which are revoked.

    To be announced.
    Raises: NotFound, ArchivedError.
    """
    before = await lock_service_account(
        conn, org_id=org_id, project_id=project_id, service_account_id=service_account_id
    )
    gone = sa.update(service_accounts).where(service_accounts.c.id == service_account_id)
    gone = gone.where(service_accounts.c.org_id == org_id).values(archived_at=sa.func.now())
    await conn.execute(gone)
    await revoke_keys_of_service_account(
        conn, org_id=org_id, service_account_id=service_account_id, actor=actor
    )
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="service_account.deleted",
        target=service_account_id,
        before={"project_id": project_id, "name": before.name, "role": before.project_role},
    )


async def lock_service_account(
    conn: AsyncConnection, *, org_id: str, project_id: str, service_account_id: str
) -> ServiceAccount:
    """A live one that nobody changes before this commits. Raises: NotFound, ArchivedError."""
    await lock_project(conn, org_id=org_id, project_id=project_id)
    held = _live(org_id, project_id).with_for_update(key_share=True)
    return await _read(conn, held, service_account_id)


async def _read(
    conn: AsyncConnection, listed: sa.Select[Any], service_account_id: str
) -> ServiceAccount:
    found = listed.where(service_accounts.c.id == service_account_id)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("service_account_id", f"no service account {service_account_id!r}")
    return ServiceAccount(**row._mapping)


def _live(org_id: str, project_id: str) -> sa.Select[Any]:
    found = sa.select(service_accounts).where(service_accounts.c.org_id == org_id)
    return found.where(
        service_accounts.c.project_id == project_id, service_accounts.c.archived_at.is_(None)
    )
