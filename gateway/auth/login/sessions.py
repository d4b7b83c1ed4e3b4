"""Browser sessions of signed-in users, and the seals that are bound to a browser's cookie.

A browser has a cookie before anybody signs in, so that forms are bound to it; signing in replaces
it, so that nobody can plant theirs (session fixation). Tokens are stored hashed, and expire.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.auth.tables import oauth_sessions
from gateway.db import delete_some
from gateway.ids import uuid7
from gateway.permissions import ADMIN_SCOPES, SERVICE_SCOPES
from gateway.principal import SCOPE_USAGE_READ, Principal, Role
from gateway.secret import Peppers, Secret, random_secret
from gateway.tenancy.keys.owners import MAX_OWNED
from gateway.tenancy.member_tables import project_members, users
from gateway.tenancy.tables import orgs

SESSION_PEPPER_PURPOSE = "oauth-session"
SESSION_LIFETIME_S = 12 * 3600
SESSION_KEPT_S = 86_400
MAX_PURGED = 100
MAX_COOKIE_LENGTH = 256
DEVICE_LIFETIME_S = 90 * 86_400
OF_SESSIONS = ADMIN_SCOPES | SERVICE_SCOPES | {SCOPE_USAGE_READ}
"""The scopes of somebody who is signed in; their role says which of them count."""
MARK_LIFETIME_S = 3600
"""The time to sign in again for a client that requires it."""
CHALLENGE_LIFETIME_S = 300


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A live session, with the present data of its user."""

    id: str
    org_id: str
    user_id: str
    amr: list[str]
    auth_time: datetime
    expires_at: datetime
    email: str
    name: str
    role: Role
    org_name: str
    is_operator: bool
    has_password: bool
    owned_projects: list[str] = []
    """The projects of the org that the user owns, MAX_OWNED at most."""

    @property
    def owns_project(self) -> bool:
        return bool(self.owned_projects)


async def start_session(
    conn: AsyncConnection,
    peppers: Peppers,
    *,
    org_id: str,
    user_id: str,
    amr: Sequence[str],
    actor: Actor,
    now: datetime,
) -> str:
    """Start a session and return its cookie's value; delete some old sessions of the org."""
    token, session_id = random_secret(), f"session_{uuid7().hex}"
    await conn.execute(
        sa.insert(oauth_sessions).values(
            id=session_id,
            org_id=org_id,
            user_id=user_id,
            token_hash=peppers.hash(token),
            amr=list(amr),
            ip=actor.ip,
            auth_time=now,
            expires_at=now + timedelta(seconds=SESSION_LIFETIME_S),
        )
    )
    await delete_some(
        conn,
        oauth_sessions.c.id,
        oauth_sessions.c.org_id == org_id,
        oauth_sessions.c.expires_at < now - timedelta(seconds=SESSION_KEPT_S),
        limit=MAX_PURGED,
    )
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="login.succeeded",
        target=user_id,
        after={"session_id": session_id, "amr": list(amr)},
    )
    return token


async def find_session(
    conn: AsyncConnection, peppers: Peppers, token: str, *, now: datetime
) -> Session | None:
    """Return the session; None if it has ended, or its user or org is archived."""
    c = oauth_sessions.c
    joined = oauth_sessions.join(users, c.user_id == users.c.id).join(orgs, c.org_id == orgs.c.id)
    own = ("id", "org_id", "user_id", "amr", "auth_time", "expires_at")
    columns: list[sa.ColumnElement[Any]] = [c[name] for name in own]
    columns += [users.c.email, users.c.name, users.c.role]
    columns += [orgs.c.name.label("org_name"), orgs.c.is_operator]
    columns.append(users.c.password_hash.is_not(None).label("has_password"))
    owned = sa.select(project_members.c.project_id)
    owned = owned.where(project_members.c.user_id == users.c.id).correlate(users)
    owned = owned.where(project_members.c.role == "owner", project_members.c.removed_at.is_(None))
    first = owned.order_by(project_members.c.project_id).limit(MAX_OWNED)
    columns.append(sa.func.array(first.scalar_subquery()).label("owned_projects"))
    found = sa.select(*columns).select_from(joined)
    found = found.where(c.token_hash.in_(peppers.hashes(token)))
    found = found.where(c.ended_at.is_(None), c.expires_at > now)
    found = found.where(users.c.archived_at.is_(None), orgs.c.archived_at.is_(None))
    row = (await conn.execute(found)).one_or_none()
    return None if row is None else Session(**row._mapping)


async def end_session(conn: AsyncConnection, session: Session, *, actor: Actor) -> None:
    c = oauth_sessions.c
    live = sa.update(oauth_sessions).where(
        c.id == session.id, c.org_id == session.org_id, c.ended_at.is_(None)
    )
    if (await conn.execute(live.values(ended_at=sa.func.now()))).rowcount:
        await record(
            conn,
            org_id=session.org_id,
            actor=actor,
            action="logout.succeeded",
            target=session.user_id,
            after={"session_id": session.id},
        )


async def holds_session(conn: AsyncConnection, session: Session) -> bool:
    """Lock a session; True if it is live, and then it stays so until this transaction ends."""
    c = oauth_sessions.c
    live = sa.select(c.id).where(c.id == session.id, c.org_id == session.org_id)
    live = live.where(c.ended_at.is_(None)).with_for_update(read=True)
    return await conn.scalar(live) is not None


async def end_sessions_of(conn: AsyncConnection, *, org_id: str, user_id: str) -> None:
    """End all sessions of a user."""
    c = oauth_sessions.c
    live = sa.update(oauth_sessions).where(
        c.org_id == org_id, c.user_id == user_id, c.ended_at.is_(None)
    )
    await conn.execute(live.values(ended_at=sa.func.now()))


def principal_of(session: Session) -> Principal:
    """Return who is signed in, as a caller with all the rights of their role, no more: of no
    project, so nothing is billed to it."""
    return Principal(
        kind="session",
        org_id=session.org_id,
        org_name=session.org_name,
        project_id="",
        key_id=session.user_id,
        key_hint="session",
        scopes=OF_SESSIONS,
        expires_at=session.expires_at.timestamp(),
        role=session.role,
        owned_projects=frozenset(session.owned_projects),
        user_id=session.user_id,
        is_operator=session.is_operator,
    )


class Seals:
    """Makes and checks tokens that a browser gets and has to send back: unforgeable, and bound to
    its cookie."""

    def __init__(self, secret: Secret) -> None:
        self._keys = tuple(key.derive("oauth-browser-seal") for key in secret.keys)

    def form_token(self, cookie: str, purpose: str) -> str:
        """Make the token for the hidden field of a form, good for this browser and form alone."""
        return self._seal("form", cookie, purpose)

    def is_form_token(self, token: str, cookie: str, purpose: str) -> bool:
        return self._is(token, "form", cookie, purpose)

    def mark(self, now: datetime) -> str:
        """Seal the moment at which a user was asked to sign in again (`prompt=login`)."""
        moment = now.isoformat()
        return f"{moment}~{self._seal('mark', moment)}"

    def read_mark(self, mark: str, *, now: datetime) -> datetime | None:
        """Return the moment in a mark; None if the mark is not ours, or old."""
        moment, _, seal = mark.partition("~")
        if not self._is(seal, "mark", moment):
            return None
        asked_at = datetime.fromisoformat(moment)
        return asked_at if now - asked_at < timedelta(seconds=MARK_LIFETIME_S) else None

    def device(self, account: str, now: datetime) -> str:
        """Make the device cookie for a browser from which the account's owner signed in."""
        name = f"{int(now.timestamp())}.{random_secret()}"
        return f"{name}.{self._seal('device', account, name)}"

    def read_device(self, cookie: str, account: str, *, now: datetime) -> str | None:
        """Return the device's name, if the cookie is of this account."""
        name, _, seal = cookie.rpartition(".")
        if len(cookie) > MAX_COOKIE_LENGTH or not self._is(seal, "device", account, name):
            return None
        made = int(name.partition(".")[0])
        return name if now.timestamp() - made < DEVICE_LIFETIME_S else None

    def choice(self, cookie: str, user_id: str, password_hash: str, now: datetime) -> str:
        """Seal that a password was right just now, for one who is yet to say as whom of several
        users they sign in."""
        moment = str(int(now.timestamp()))
        return f"{moment}.{user_id}.{self._seal('choice', cookie, user_id, password_hash, moment)}"

    def is_choice(
        self, choice: str, cookie: str, user_id: str, password_hash: str, *, now: datetime
    ) -> bool:
        moment, _, rest = choice.partition(".")
        seal = rest.rpartition(".")[2]
        if not self._is(seal, "choice", cookie, user_id, password_hash, moment):
            return False
        return now.timestamp() - int(moment) < CHALLENGE_LIFETIME_S

    def challenge(self, cookie: str, purpose: str, now: datetime) -> bytes:
        """Make a challenge for a passkey to sign (WebAuthn, 13.4.3): random, bound to this browser,
        and good for CHALLENGE_LIFETIME_S."""
        name = f"{int(now.timestamp())}.{random_secret()}"
        return f"{name}.{self._seal('challenge', cookie, purpose, name)}".encode()

    def is_challenge(self, challenge: bytes, cookie: str, purpose: str, *, now: datetime) -> bool:
        if len(challenge) > MAX_COOKIE_LENGTH or not challenge.isascii():
            return False
        name, _, seal = challenge.decode().rpartition(".")
        if not self._is(seal, "challenge", cookie, purpose, name):
            return False
        return now.timestamp() - int(name.partition(".")[0]) < CHALLENGE_LIFETIME_S

    def _seal(self, *parts: str) -> str:
        return _hmac(self._keys[0], parts)

    def _is(self, seal: str, *parts: str) -> bool:
        if not seal.isascii():
            return False
        found = [hmac.compare_digest(_hmac(key, parts), seal) for key in self._keys]
        return any(found)


def _hmac(key: bytes, parts: Sequence[str]) -> str:
    """Return the HMAC of the parts, each with its length: no two lists have the same encoding."""
    data = msgspec.msgpack.encode([part.encode("utf-8", "surrogatepass") for part in parts])
    return hmac.digest(key, data, "sha256").hex()
