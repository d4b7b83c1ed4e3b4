"""Invites: somebody may become a user of an org by a link that works once, for a week.

Nobody here sends an e-mail (`gateway.net.mail` does, for routes): the link stands in the answer to
whoever invites, this once; what is stored is its token's HMAC under a pepper that Postgres never
sees.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.ids import uuid7
from gateway.principal import Role
from gateway.secret import Secret
from gateway.tenancy.errors import InvalidField, InviteClosed, NameTaken, NotFound
from gateway.tenancy.member_tables import (
    PROJECT_ROLES,
    ProjectRole,
    check_email,
    check_role,
    invites,
    users,
)
from gateway.tenancy.members.members import join
from gateway.tenancy.members.users import User, create_user
from gateway.tenancy.pages import FIRST, Cursor, read_page
from gateway.tenancy.projects import lock_project
from gateway.tenancy.tables import orgs, projects

LIFETIME = timedelta(days=7)
PEPPER_PURPOSE = "invite"
ACCEPT_PATH = "/invites/accept"
"""The path of the login flow's page: `{public_url}/invites/accept?token=...`."""
TOKEN_BYTES = 32
MAX_TOKEN_LENGTH = 64
MAX_PROJECTS = 100

Status = Literal["accepted", "expired", "pending"]


class ProjectGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A project that whoever accepts becomes a member of."""

    id: str
    role: ProjectRole


class Invite(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    email: str
    role: Role
    projects: list[ProjectGrant]
    created_at: datetime
    expires_at: datetime
    accepted_at: datetime | None

    def status(self, now: datetime) -> Status:
        if self.accepted_at is not None:
            return "accepted"
        return "expired" if self.expires_at <= now else "pending"


class CreatedInvite(msgspec.Struct, frozen=True, kw_only=True):
    invite: Invite
    token: str
    """The token, which is shown only this once."""

    def __repr__(self) -> str:
        return f"CreatedInvite({self.invite.id})"


COLUMNS = [invites.c[field] for field in Invite.__struct_fields__]


def token_hashes(secret: Secret, token: str) -> list[str]:
    """Return the hash of the token under each of the installation's secrets, the current one
    first."""
    return [
        hmac.new(key.derive(PEPPER_PURPOSE), token.encode(), "sha256").hexdigest()
        for key in secret.keys
    ]


def to_link(public_url: str, token: str) -> str:
    return f"{public_url.rstrip('/')}{ACCEPT_PATH}?token={token}"


async def create_invite(
    conn: AsyncConnection,
    *,
    org_id: str,
    email: str,
    role: str,
    projects: Sequence[ProjectGrant],
    secret: Secret,
    actor: Actor,
    now: datetime | None = None,
) -> CreatedInvite:
    """One open invite an address: an expired one makes room.

    Raises: InvalidField, NotFound (project), ArchivedError, NameTaken (a user or an open invite has
    the address).
    """
    moment = now or datetime.now(tz=UTC)
    address = check_email(email)
    wanted = check_role(role)
    await _check_projects(conn, org_id, projects)
    member = sa.select(users.c.id).where(users.c.org_id == org_id, users.c.email == address)
    if await conn.scalar(member.where(users.c.archived_at.is_(None))) is not None:
        raise NameTaken("email", "the organization has a user with this address")
    expired = sa.update(invites).where(invites.c.org_id == org_id, invites.c.email == address)
    expired = expired.where(invites.c.accepted_at.is_(None), invites.c.archived_at.is_(None))
    expired = expired.where(invites.c.expires_at <= moment).values(archived_at=moment)
    gone = (await conn.scalars(expired.returning(invites.c.id))).all()
    token = secrets.token_urlsafe(TOKEN_BYTES)
    row = {
        "id": f"invite_{uuid7().hex}",
        "org_id": org_id,
        "email": address,
        "role": wanted,
        "projects": {grant.id: grant.role for grant in projects},
        "token_hash": token_hashes(secret, token)[0],
        "created_at": moment,
        "expires_at": moment + LIFETIME,
    }
    added = insert(invites).values(**row).on_conflict_do_nothing().returning(*COLUMNS)
    made = (await conn.execute(added)).one_or_none()
    if made is None:
        raise NameTaken("email", "there is an open invite for this address")
    invite = _to_invite(made)
    for each in gone:
        await record(
            conn,
            org_id=org_id,
            actor=actor,
            action="invite.expired",
            target=each,
            before={"email": address},
            after={"archived_at": moment},
        )
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="invite.sent",
        target=invite.id,
        after={"email": address, "role": wanted, "projects": row["projects"]},
    )
    return CreatedInvite(invite=invite, token=token)


async def default_projects(conn: AsyncConnection, *, org_id: str) -> list[ProjectGrant]:
    """Return the projects of an invite that names none: the oldest live project of the org."""
    live = sa.select(projects.c.id).where(projects.c.org_id == org_id)
    live = live.where(projects.c.archived_at.is_(None)).order_by(projects.c.id).limit(1)
    oldest = await conn.scalar(live)
    return [] if oldest is None else [ProjectGrant(id=oldest, role="member")]


async def get_invite(conn: AsyncConnection, *, org_id: str, invite_id: str) -> Invite:
    """Raises: NotFound."""
    row = (await conn.execute(_kept(org_id).where(invites.c.id == invite_id))).one_or_none()
    if row is None:
        raise NotFound("invite_id", f"no invite {invite_id!r}")
    return _to_invite(row)


async def list_invites(
    conn: AsyncConnection, *, org_id: str, cursor: Cursor = FIRST
) -> tuple[list[Invite], bool]:
    """Return invites, accepted and expired ones too. Raises: InvalidField (limit)."""
    rows, more = await read_page(conn, _kept(org_id), invites.c.id, cursor)
    return [_to_invite(row) for row in rows], more


async def delete_invite(
    conn: AsyncConnection, *, org_id: str, invite_id: str, actor: Actor
) -> None:
    """Delete an invite: its link stops working. Raises: NotFound, InviteClosed."""
    found = _kept(org_id).where(invites.c.id == invite_id).with_for_update(key_share=True)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("invite_id", f"no invite {invite_id!r}")
    before = _to_invite(row)
    if before.accepted_at is not None:
        raise InviteClosed("invite_id", "the invite was accepted")
    gone = sa.update(invites).where(invites.c.org_id == org_id, invites.c.id == invite_id)
    await conn.execute(gone.values(archived_at=sa.func.now()))
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="invite.deleted",
        target=invite_id,
        before={"email": before.email, "role": before.role},
    )


async def find_invite(
    conn: AsyncConnection, token: str, *, secret: Secret, now: datetime | None = None
) -> Invite:
    """The open invite of a link, for the page that it leads to; `conn` is the system's, or of the
    invite's org.

    Raises: NotFound: unknown, used, withdrawn or expired alike.
    """
    return await _open_invite(conn, token, secret, now or datetime.now(tz=UTC), lock=False)


async def accept_invite(
    conn: AsyncConnection,
    token: str,
    *,
    secret: Secret,
    name: str,
    password_hash: str | None = None,
    ip: str | None = None,
    request_id: str | None = None,
    now: datetime | None = None,
) -> User:
    """Make the user that was invited, once; `conn` is the system's, or of the invite's org. A
    project that was archived meanwhile is left out.

    Raises: NotFound (as `find_invite`), InvalidField (name), NameTaken (the address has a user by
    now).
    """
    moment = now or datetime.now(tz=UTC)
    invite = await _open_invite(conn, token, secret, moment, lock=True)
    joined = await _lock_live(conn, invite)  # before anything is recorded, as `record` wants it
    user = await create_user(
        conn,
        org_id=invite.org_id,
        email=invite.email,
        name=name,
        role=invite.role,
        actor=Actor(kind="system", id=invite.id, ip=ip, request_id=request_id),
        password_hash=password_hash,
    )
    for grant in joined:
        await join(conn, org_id=user.org_id, project_id=grant.id, user_id=user.id, role=grant.role)
    accepted = sa.update(invites).where(invites.c.id == invite.id)
    await conn.execute(accepted.values(accepted_at=moment, accepted_by=user.id))
    await record(
        conn,
        org_id=invite.org_id,
        actor=Actor(kind="user", id=user.id, ip=ip, request_id=request_id),
        action="invite.accepted",
        target=invite.id,
        after={"user_id": user.id, "projects": msgspec.to_builtins(joined)},
    )
    return user


async def _lock_live(conn: AsyncConnection, invite: Invite) -> list[ProjectGrant]:
    """Lock those of its projects that are live, so that they stay so until the commit."""
    wanted = [grant.id for grant in invite.projects]
    live = sa.select(projects.c.id).where(projects.c.org_id == invite.org_id)
    live = live.where(projects.c.id.in_(wanted), projects.c.archived_at.is_(None))
    found = set(await conn.scalars(live.order_by(projects.c.id).with_for_update(read=True)))
    return [grant for grant in invite.projects if grant.id in found]


async def _open_invite(
    conn: AsyncConnection, token: str, secret: Secret, now: datetime, *, lock: bool
) -> Invite:
    unknown = NotFound("token", "no open invite has this link")
    if not 1 <= len(token) <= MAX_TOKEN_LENGTH or not token.isascii():
        raise unknown
    joined = invites.join(orgs, invites.c.org_id == orgs.c.id)
    found = sa.select(*COLUMNS).select_from(joined).where(orgs.c.archived_at.is_(None))
    found = found.where(invites.c.token_hash.in_(token_hashes(secret, token)))
    found = found.where(invites.c.accepted_at.is_(None), invites.c.archived_at.is_(None))
    found = found.where(invites.c.expires_at > now)
    if lock:
        found = found.with_for_update(key_share=True, of=invites)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise unknown
    return _to_invite(row)


async def _check_projects(
    conn: AsyncConnection, org_id: str, grants: Sequence[ProjectGrant]
) -> None:
    if len(grants) > MAX_PROJECTS:
        raise InvalidField("projects", f"must be at most {MAX_PROJECTS}")
    if len({grant.id for grant in grants}) != len(grants):
        raise InvalidField("projects", "a project stands there twice")
    for grant in sorted(grants, key=lambda grant: grant.id):  # one order of locks for all
        check_role(grant.role, PROJECT_ROLES)
        await lock_project(conn, org_id=org_id, project_id=grant.id)


def _kept(org_id: str) -> sa.Select[Any]:
    return sa.select(*COLUMNS).where(invites.c.org_id == org_id, invites.c.archived_at.is_(None))


def _to_invite(row: sa.Row[Any]) -> Invite:
    values = dict(row._mapping)
    roles: dict[str, ProjectRole] = values["projects"]
    values["projects"] = [ProjectGrant(id=id_, role=roles[id_]) for id_ in sorted(roles)]
    return Invite(**values)
