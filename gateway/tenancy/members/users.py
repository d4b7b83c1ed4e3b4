"""Users of an org: made, found, given roles, archived. A person in two orgs is two users.

An org keeps an owner: who takes the role from one, or archives one, waits for whoever does the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.ids import uuid7
from gateway.principal import Role
from gateway.tenancy.errors import LastOwner, NameTaken, NotFound
from gateway.tenancy.keys.owned_keys import revoke_keys_of_user
from gateway.tenancy.member_tables import check_email, check_role, project_members, users
from gateway.tenancy.pages import FIRST, Cursor, read_page
from gateway.tenancy.tables import check_name, orgs, projects

OWNER = "owner"


class AnyPassword(Enum):
    ANY = "any"


ANY = AnyPassword.ANY
"""Matches a user with any password, or with none."""


class User(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    email: str
    name: str
    role: Role
    mail_choices: dict[str, bool]
    """The topics that they switched on or off (`mail_topics`)."""
    created_at: datetime
    archived_at: datetime | None


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """A live project that a user is a member of."""

    project_id: str
    name: str
    role: str


COLUMNS = [users.c[field] for field in User.__struct_fields__]


async def create_user(
    conn: AsyncConnection,
    *,
    org_id: str,
    email: str,
    name: str,
    role: str,
    actor: Actor,
    password_hash: str | None = None,
) -> User:
    """A user of a live org. Raises: InvalidField, NameTaken (email), NotFound (org)."""
    row: dict[str, Any] = {
        "id": f"user_{uuid7().hex}",
        "org_id": org_id,
        "email": check_email(email),
        "name": check_name(name),
        "role": check_role(role),
    }
    # The lock keeps the organization from being archived before this commits.
    live = sa.select(orgs.c.id).where(orgs.c.id == org_id, orgs.c.archived_at.is_(None))
    if await conn.scalar(live.with_for_update(read=True)) is None:
        raise NotFound("org", f"no organization {org_id!r}")
    added = insert(users).values(**row, password_hash=password_hash).on_conflict_do_nothing()
    made = (await conn.execute(added.returning(*COLUMNS))).one_or_none()
    if made is None:
        raise NameTaken("email", "the organization has a user with this address")
    user = User(**made._mapping)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="user.added",
        target=user.id,
        after={"email": user.email, "name": user.name, "role": user.role},
    )
    return user


async def get_user(conn: AsyncConnection, *, org_id: str, user_id: str) -> User:
    """A live user. Raises: NotFound."""
    found = _live(org_id).where(users.c.id == user_id)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("user_id", f"no user {user_id!r}")
    return User(**row._mapping)


async def find_user(conn: AsyncConnection, *, org_id: str, email: str) -> User:
    """A live user by address, however it is written. Raises: InvalidField, NotFound."""
    found = _live(org_id).where(users.c.email == check_email(email))
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("email", "no user of the organization has this address")
    return User(**row._mapping)


async def list_users(
    conn: AsyncConnection, *, org_id: str, emails: Sequence[str] = (), cursor: Cursor = FIRST
) -> tuple[list[User], bool]:
    """Return live users, of these addresses where any are given. Raises: InvalidField."""
    listed = _live(org_id)
    if emails:
        listed = listed.where(users.c.email.in_([check_email(email) for email in emails]))
    rows, more = await read_page(conn, listed, users.c.id, cursor)
    return [User(**row._mapping) for row in rows], more


async def memberships(
    conn: AsyncConnection, *, org_id: str, user_ids: Sequence[str]
) -> dict[str, list[Membership]]:
    """The live projects of each user who is in any, oldest first."""
    joined = project_members.join(projects, project_members.c.project_id == projects.c.id)
    found = sa.select(
        project_members.c.user_id,
        project_members.c.project_id,
        projects.c.name,
        project_members.c.role,
    ).select_from(joined)
    found = found.where(project_members.c.org_id == org_id)
    found = found.where(project_members.c.user_id.in_(user_ids))
    found = found.where(project_members.c.removed_at.is_(None), projects.c.archived_at.is_(None))
    by_user: dict[str, list[Membership]] = {}
    for row in await conn.execute(found.order_by(project_members.c.project_id)):
        by_user.setdefault(row.user_id, []).append(
            Membership(project_id=row.project_id, name=row.name, role=row.role)
        )
    return by_user


async def change_role(
    conn: AsyncConnection, *, org_id: str, user_id: str, role: str, actor: Actor
) -> User:
    """Change a role; to be announced: the user's credentials lose, or gain, what the role has.

    Raises: InvalidField, NotFound, LastOwner.
    """
    wanted = check_role(role)
    before = await lock_user(conn, org_id=org_id, user_id=user_id)
    if before.role == wanted:
        return before
    if before.role == OWNER:
        await _keep_an_owner(conn, before)
    changed = sa.update(users).where(users.c.org_id == org_id, users.c.id == user_id)
    row = (await conn.execute(changed.values(role=wanted).returning(*COLUMNS))).one()
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="user.updated",
        target=user_id,
        before={"role": before.role},
        after={"role": wanted},
    )
    return User(**row._mapping)


async def set_password(
    conn: AsyncConnection,
    *,
    org_id: str,
    user_id: str,
    password_hash: str,
    actor: Actor,
    replacing: str | AnyPassword | None = ANY,
) -> None:
    """Set a password; `replacing`: the hash that they have now.

    Raises: NotFound, also where it is another one.
    """
    changed = sa.update(users).where(users.c.org_id == org_id, users.c.id == user_id)
    changed = changed.where(users.c.archived_at.is_(None)).values(password_hash=password_hash)
    if not isinstance(replacing, AnyPassword):
        changed = changed.where(users.c.password_hash.is_not_distinct_from(replacing))
    if (await conn.execute(changed)).rowcount == 0:
        raise NotFound("user_id", f"no user {user_id!r}")
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="user.updated",
        target=user_id,
        after={"password_changed": True},
    )


async def archive_user(conn: AsyncConnection, *, org_id: str, user_id: str, actor: Actor) -> User:
    """Take a user out of the org and of all its projects, with every key of theirs revoked. To be
    announced.

    Raises: NotFound, LastOwner.
    """
    before = await lock_user(conn, org_id=org_id, user_id=user_id)
    if before.role == OWNER:
        await _keep_an_owner(conn, before)
    now = sa.func.now()
    gone = sa.update(users).where(users.c.org_id == org_id, users.c.id == user_id)
    # Nobody logs in with it again, so nobody needs to be able to.
    gone = gone.values(archived_at=now, password_hash=None)
    row = (await conn.execute(gone.returning(*COLUMNS))).one()
    left = sa.update(project_members).where(project_members.c.user_id == user_id)
    left = left.where(project_members.c.org_id == org_id, project_members.c.removed_at.is_(None))
    await conn.execute(left.values(removed_at=now))
    await revoke_keys_of_user(conn, org_id=org_id, user_id=user_id, actor=actor)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="user.deleted",
        target=user_id,
        before={"email": before.email, "name": before.name, "role": before.role},
    )
    return User(**row._mapping)


async def lock_user(conn: AsyncConnection, *, org_id: str, user_id: str) -> User:
    """A live user whom nobody changes before this commits. The org is locked first, always: of two
    who each demote the other one waits, and then sees it. Raises: NotFound."""
    org = sa.select(orgs.c.id).where(orgs.c.id == org_id)
    await conn.execute(org.with_for_update(key_share=True))
    found = _live(org_id).where(users.c.id == user_id).with_for_update(key_share=True)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("user_id", f"no user {user_id!r}")
    return User(**row._mapping)


async def _keep_an_owner(conn: AsyncConnection, leaving: User) -> None:
    """Raises: LastOwner."""
    others = sa.select(sa.func.count()).select_from(users)
    others = others.where(users.c.org_id == leaving.org_id, users.c.archived_at.is_(None))
    others = others.where(users.c.role == OWNER, users.c.id != leaving.id)
    if not await conn.scalar(others):
        raise LastOwner("role", "the organization would have no owner left")


def _live(org_id: str) -> sa.Select[Any]:
    return sa.select(*COLUMNS).where(users.c.org_id == org_id, users.c.archived_at.is_(None))
