"""Signs users in: starts a session for a right password or passkey.

A refusal does not say, neither in words nor by the time it takes, whether the organization, the
e-mail address or the password was wrong.
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
from gateway.db import tenant
from gateway.secret import Peppers
from gateway.tenancy.member_tables import users
from gateway.tenancy.tables import orgs

PASSWORD = ("pwd",)
"""The `amr` of a login by password (RFC 8176)."""
MAX_FIELD_LENGTH = 320
KIND = "login"


class WrongCredentials(Exception):
    """The credentials are wrong; nothing says which part of them."""


class LoginOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of an attempt to log in."""

    address: str | None
    device_cookie: str | None
    request_id: str | None

    def actor(self, user_id: str) -> Actor:
        return Actor(kind="user", id=user_id, ip=self.address, request_id=self.request_id)


class SignedIn(msgspec.Struct, frozen=True, kw_only=True):
    """The session cookie and the device cookie of a user who has signed in."""

    session: str
    device: str
    user_id: str

    def __repr__(self) -> str:
        return f"SignedIn({self.user_id})"


class Login:
    """The login of one process. `db` acts for one tenant at a time; `system_db` sees all orgs."""

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
        self, *, org: str, email: str, password: str, origin: LoginOrigin
    ) -> SignedIn:
        """Check a password; `org`: an id or a name.

        Raises: WrongCredentials, TooManyAttempts, PasswordsBusy, redis.exceptions.RedisError.
        """
        if max(len(org), len(email)) > MAX_FIELD_LENGTH or "\0" in org + email:
            raise WrongCredentials
        async with self._system_db.connect() as conn:
            found = await _find(conn, org, email.strip().lower())
        # Attempts are counted per account, or per typed name if there is no such account.
        account = f"{org}\0{email.strip().lower()}" if found is None else found.id
        attempt = await self._begin(account, origin)
        stored = None if found is None else found.password_hash
        if not await self._passwords.verify(password, stored) or found is None:
            raise WrongCredentials
        async with tenant(self._db, found.org_id) as conn:
            unchanged = sa.select(users.c.id).where(
                users.c.id == found.id,
                users.c.password_hash == stored,
                users.c.archived_at.is_(None),
            )
            # The password may have been changed while it was checked.
            if await conn.scalar(unchanged.with_for_update(read=True)) is None:
                raise WrongCredentials
            signed_in = await self.start(conn, found.org_id, found.id, PASSWORD, origin)
        await self._throttle.succeeded(attempt)
        return signed_in

    async def by_old_password(
        self, *, org_id: str, user_id: str, password: str, origin: LoginOrigin
    ) -> str:
        """Check the current password of a signed-in user who wants another one; return its hash.

        Guesses are throttled as on the login page, for the case of a browser that was left open.
        Raises: WrongCredentials, TooManyAttempts, PasswordsBusy, redis.exceptions.RedisError.
        """
        attempt = await self._begin(user_id, origin)
        async with tenant(self._db, org_id) as conn:
            found = sa.select(users.c.password_hash).where(users.c.org_id == org_id)
            found = found.where(users.c.id == user_id, users.c.archived_at.is_(None))
            stored: str | None = await conn.scalar(found)
        if not await self._passwords.verify(password, stored) or stored is None:
            raise WrongCredentials
        await self._throttle.succeeded(attempt)
        return stored

    async def _begin(self, account: str, origin: LoginOrigin) -> LoginAttempt:
        device = None
        if origin.device_cookie is not None:
            device = self._seals.read_device(origin.device_cookie, account, now=self._clock())
        return await self._throttle.begin(
            KIND, account=account, address=origin.address, device=device
        )

    async def start(
        self,
        conn: AsyncConnection,
        org_id: str,
        user_id: str,
        amr: tuple[str, ...],
        origin: LoginOrigin,
    ) -> SignedIn:
        """Start a session for an authenticated user, in a transaction of their org."""
        now = self._clock()
        session = await start_session(
            conn,
            self._sessions,
            org_id=org_id,
            user_id=user_id,
            amr=amr,
            actor=origin.actor(user_id),
            now=now,
        )
        return SignedIn(session=session, device=self._seals.device(user_id, now), user_id=user_id)


async def _find(conn: AsyncConnection, org: str, email: str) -> Any:
    """Find a live user of a live org. `org`: an id or a name; an id wins over a name that looks
    like it."""
    joined = users.join(orgs, users.c.org_id == orgs.c.id)
    found = sa.select(users.c.id, users.c.org_id, users.c.password_hash).select_from(joined)
    found = found.where(sa.or_(orgs.c.id == org, orgs.c.name == org), users.c.email == email)
    found = found.where(users.c.archived_at.is_(None), orgs.c.archived_at.is_(None))
    ordered = found.order_by((orgs.c.id == org).desc()).limit(1)
    return (await conn.execute(ordered)).one_or_none()
