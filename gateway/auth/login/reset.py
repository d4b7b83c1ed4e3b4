"""Links to reset a password: an administrator makes one, it works once and for an hour. Tollgate
sends no e-mail.

Nothing is stored: a link is a signature over the user, its expiry, and the user's present role and
password hash. So it ends when it was used, when the password is changed in another way, and when
the user gets another role (a link for a reader must not give access to an owner).
"""

from __future__ import annotations

import hmac
import re
from datetime import UTC, datetime, timedelta

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.principal import Role
from gateway.secret import Secret
from gateway.tenancy.errors import NotFound
from gateway.tenancy.member_tables import users
from gateway.tenancy.tables import orgs

LIFETIME = timedelta(hours=1)
PURPOSE = "password-reset"
RESET_PATH = "/passwords/reset"
FORM = re.compile(r"(user_[0-9a-f]{32})\.([0-9]{1,12})\.([0-9a-f]{64})", re.ASCII)


class ResetUser(msgspec.Struct, frozen=True, kw_only=True):
    """The live user of a reset link."""

    id: str
    org_id: str
    org_name: str
    email: str
    role: Role
    password_hash: str | None

    def __repr__(self) -> str:
        return f"ResetUser({self.id})"


class ResetLink(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    """Shown once."""
    expires_at: datetime

    def __repr__(self) -> str:
        return f"ResetLink({self.expires_at})"


async def make_reset(
    conn: AsyncConnection,
    *,
    org_id: str,
    user_id: str,
    secret: Secret,
    actor: Actor,
    now: datetime,
) -> ResetLink:
    """Make a reset link for a user whom the caller has locked. Raises: NotFound."""
    user = await _find(conn, user_id, org_id)
    expires_at = (now + LIFETIME).replace(microsecond=0)
    seconds = str(int(expires_at.timestamp()))
    seal = _seals(secret, user, seconds)[0]
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="user.password_reset_created",
        target=user_id,
        after={"expires_at": expires_at},
    )
    return ResetLink(token=f"{user_id}.{seconds}.{seal}", expires_at=expires_at)


async def find_reset(
    conn: AsyncConnection, token: str, *, secret: Secret, now: datetime
) -> ResetUser:
    """Return the user of a valid link; `conn` is the system's, or of the user's org.

    Raises: NotFound: for an invalid, used, superseded or expired link alike.
    """
    parts = FORM.fullmatch(token)
    if parts is None:
        raise NotFound("token", "no open link")
    user_id, seconds, seal = parts.groups()
    user = await _find(conn, user_id)
    matches = [hmac.compare_digest(each, seal) for each in _seals(secret, user, seconds)]
    if not any(matches) or datetime.fromtimestamp(int(seconds), tz=UTC) <= now:
        raise NotFound("token", "no open link")
    return user


def to_link(public_url: str, token: str) -> str:
    return f"{public_url.rstrip('/')}{RESET_PATH}?token={token}"


async def _find(conn: AsyncConnection, user_id: str, org_id: str | None = None) -> ResetUser:
    joined = users.join(orgs, users.c.org_id == orgs.c.id)
    columns = [users.c[field] for field in ResetUser.__struct_fields__ if field != "org_name"]
    found = sa.select(*columns, orgs.c.name.label("org_name")).select_from(joined)
    found = found.where(users.c.archived_at.is_(None), orgs.c.archived_at.is_(None))
    found = found.where(users.c.id == user_id)
    if org_id is not None:
        found = found.where(users.c.org_id == org_id)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("user_id", "no such user")
    return ResetUser(**row._mapping)


def _seals(secret: Secret, user: ResetUser, seconds: str) -> list[str]:
    """Return the seal under each of the installation's secrets, the current one first."""
    signed = msgspec.msgpack.encode([user.id, seconds, user.role, user.password_hash])
    return [hmac.new(key.derive(PURPOSE), signed, "sha256").hexdigest() for key in secret.keys]
