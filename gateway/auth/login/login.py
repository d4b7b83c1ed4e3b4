"""Signing in: a password, or a passkey, becomes a session.

Whether it was the organization, the address or the password that was wrong is told to nobody,
neither by a word nor by the time it takes. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.log import Actor
from gateway.auth.login.passwords import Passwords
from gateway.auth.login.sessions import Seals, start_session
from gateway.auth.login.throttle import LoginAttempt, Throttle
from gateway.auth.peppers import Peppers
from gateway.db import tenant
from gateway.tenancy.member_tables import users
from gateway.tenancy.tables import orgs

PASSWORD = ("pwd",)
"""RFC 8176."""
MAX_FIELD_LENGTH = 320
KIND = "login"


class WrongCredentials(Exception):
    """The credentials do not match; nothing says which part of them was wrong."""


class LoginOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of an attempt to log in."""

    address: str | None
    device_cookie: str | None
    request_id: str | None

    def actor(self, user_id: str) -> Actor:
        return Actor(kind="user", id=user_id, ip=self.address, request_id=self.request_id)


class SignedIn(msgspec.Struct, frozen=True, kw_only=True):
    """Two cookies for the browser."""

    session: str
    device: str
    user_id: str

    def __repr__(self) -> str:
        return f"SignedIn({self.user_id})"


class Login:
    """One per process. `db`: bound to a tenant; `system_db`: sees all orgs."""

    def __init__(
        self,
        *,
        db: AsyncEngine,
        system_db: AsyncEngine,
        passwords: Passwords,
        throttle: Throttle,
        sessions: Peppers,
        seals: Seals,
        clock: Callable[[], datetime],
    ) -> None:
        self._db = db
        self._system_db = system_db
        self._passwords = passwords
        self._throttle = throttle
        self._sessions = sessions
        self._seals = seals
        self._clock = clock

    async def by_password(
        self, *, org: str, email: str, password: str, where: LoginOrigin
    ) -> SignedIn:
        """Check a password; `org`: an id or a name.

        Raises: WrongCredentials, TooManyAttempts, PasswordsBusy, redis.exceptions.RedisError.
        """
        if max(len(org), len(email)) > MAX_FIELD_LENGTH or "\0" in org + email:
            raise WrongCredentials
        async with self._system_db.connect() as conn:
            found = await _find(conn, org, email.strip().lower())
        # What is counted is the account; of one that there is not, what was typed.
        account = f"{org}\0{email.strip().lower()}" if found is None else found.id
        attempt = await self._begin(account, where)
        stored = None if found is None else found.password_hash
        if not await self._passwords.verify(password, stored) or found is None:
            raise WrongCredentials
        async with tenant(self._db, found.org_id) as conn:
            same = sa.select(users.c.id).where(users.c.id == found.id)
            same = same.where(users.c.password_hash == stored, users.c.archived_at.is_(None))
            # The password may have been changed while it was checked.
            if await conn.scalar(same.with_for_update(read=True)) is None:
                raise WrongCredentials
            signed_in = await self.start(conn, found.org_id, found.id, PASSWORD, where)
        await self._throttle.succeeded(attempt)
        return signed_in

    async def by_old_password(
        self, *, org_id: str, user_id: str, password: str, where: LoginOrigin
    ) -> str:
        """Check the current password of a signed-in user who wants another one, and return its
        hash. A browser left open lets nobody guess more often than the login page would.

        Raises: WrongCredentials, TooManyAttempts, PasswordsBusy, redis.exceptions.RedisError.
        """
        attempt = await self._begin(user_id, where)
        async with tenant(self._db, org_id) as conn:
            theirs = sa.select(users.c.password_hash).where(users.c.org_id == org_id)
            theirs = theirs.where(users.c.id == user_id, users.c.archived_at.is_(None))
            stored: str | None = await conn.scalar(theirs)
        if not await self._passwords.verify(password, stored) or stored is None:
            raise WrongCredentials
        await self._throttle.succeeded(attempt)
        return stored

    async def _begin(self, account: str, where: LoginOrigin) -> LoginAttempt:
        device = None
        if where.device_cookie is not None:
            device = self._seals.read_device(where.device_cookie, account, now=self._clock())
        return await self._throttle.begin(
            KIND, account=account, address=where.address, device=device
        )

    async def start(
        self,
        conn: AsyncConnection,
        org_id: str,
        user_id: str,
        amr: tuple[str, ...],
        where: LoginOrigin,
    ) -> SignedIn:
        """Start a session for somebody who has proven who they are, in a transaction of their
        org."""
        now = self._clock()
        session = await start_session(
            conn,
            self._sessions,
            org_id=org_id,
            user_id=user_id,
            amr=amr,
            actor=where.actor(user_id),
            now=now,
        )
        return SignedIn(session=session, device=self._seals.device(user_id, now), user_id=user_id)


async def _find(conn: AsyncConnection, org: str, email: str) -> Any:
    """A live user of a live org. Names look like no id: an org named like another's id is refused
    by being found second."""
    joined = users.join(orgs, users.c.org_id == orgs.c.id)
    found = sa.select(users.c.id, users.c.org_id, users.c.password_hash).select_from(joined)
    found = found.where(sa.or_(orgs.c.id == org, orgs.c.name == org), users.c.email == email)
    found = found.where(users.c.archived_at.is_(None), orgs.c.archived_at.is_(None))
    ordered = found.order_by((orgs.c.id == org).desc()).limit(1)
    return (await conn.execute(ordered)).one_or_none()
