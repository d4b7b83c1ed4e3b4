"""Signs users in: starts a session for a right password or passkey.

A refusal does not say, neither in words nor by the time it takes, whether the organization, the
e-mail address or the password was wrong.
"""

from __future__ import annotations

import re
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
from gateway.tenancy.member_tables import domain_of, users
from gateway.tenancy.tables import orgs

PASSWORD = ("pwd",)
"""The `amr` of a login by password (RFC 8176)."""
MAX_FIELD_LENGTH = 320
MOST_ORGS = 3
"""A password is tried at so many organizations of an e-mail address, and as often where there are
fewer; in others one signs in by their name."""
CHOICE = re.compile(r"[0-9]{1,12}\.(user_[0-9a-f]{32})\.[0-9a-f]{64}", re.ASCII)
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


class OrgChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of several organizations at which an e-mail address and a password are right."""

    org_name: str
    choice: str
    """Sealed; `Login.by_choice` takes it for some minutes, of the same browser."""


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
        signed_in = await self._start_with(found, origin)
        await self._throttle.succeeded(attempt)
        return signed_in

    async def by_email(
        self, *, email: str, password: str, cookie: str, origin: LoginOrigin
    ) -> SignedIn | list[OrgChoice]:
        """Check a password of somebody who names no organization; a list: it is right at several.
        `cookie`: the browser's, to which a choice is bound.

        Neither the time nor the bounds on guessing tell how many organizations there are.
        Raises: as `by_password`.
        """
        address = email.strip().lower()
        if len(email) > MAX_FIELD_LENGTH or "\0" in email:
            raise WrongCredentials
        async with self._system_db.connect() as conn:
            found = await _find_all(conn, address)
        accounts = [each.id for each in found] or [f"\0{address}"]
        devices = {each: self._device_of(each, origin) for each in accounts}
        attempts = await self._throttle.begin_all(KIND, devices, address=origin.address)
        stored = [each.password_hash for each in found]
        stored += [None] * (MOST_ORGS - len(found))
        right = [await self._passwords.verify(password, each) for each in stored]
        users_at = [each for each, is_right in zip(found, right, strict=False) if is_right]
        if not users_at:
            raise WrongCredentials
        if len(users_at) > 1:
            now = self._clock()
            return [
                OrgChoice(
                    org_name=each.org_name,
                    choice=self._seals.choice(cookie, each.id, each.password_hash, now),
                )
                for each in users_at
            ]
        [user] = users_at
        signed_in = await self._start_with(user, origin)
        await self._throttle.succeeded(attempts[found.index(user)])
        return signed_in

    async def by_choice(self, choice: str, *, cookie: str, origin: LoginOrigin) -> SignedIn:
        """Sign in at one of several organizations. Raises: WrongCredentials: too late, of another
        browser, or the password was changed."""
        parts = CHOICE.fullmatch(choice)
        if parts is None:
            raise WrongCredentials
        async with self._system_db.connect() as conn:
            user = (await conn.execute(_live().where(users.c.id == parts[1]))).one_or_none()
        stored = None if user is None else user.password_hash
        now = self._clock()
        if user is None or not self._seals.is_choice(
            choice, cookie, user.id, stored or "", now=now
        ):
            raise WrongCredentials
        return await self._start_with(user, origin)

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

    async def _start_with(self, user: Any, origin: LoginOrigin) -> SignedIn:
        """Start a session for a user whose password was right. Raises: WrongCredentials."""
        async with tenant(self._db, user.org_id) as conn:
            unchanged = sa.select(users.c.id).where(
                users.c.id == user.id,
                users.c.password_hash == user.password_hash,
                users.c.archived_at.is_(None),
            )
            # The password may have been changed while it was checked.
            if await conn.scalar(unchanged.with_for_update(read=True)) is None:
                raise WrongCredentials
            return await self.start(conn, user.org_id, user.id, PASSWORD, origin)

    async def _begin(self, account: str, origin: LoginOrigin) -> LoginAttempt:
        device = self._device_of(account, origin)
        return await self._throttle.begin(
            KIND, account=account, address=origin.address, device=device
        )

    def _device_of(self, account: str, origin: LoginOrigin) -> str | None:
        if origin.device_cookie is None:
            return None
        return self._seals.read_device(origin.device_cookie, account, now=self._clock())

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
    found = _live().where(sa.or_(orgs.c.id == org, orgs.c.name == org), users.c.email == email)
    ordered = found.order_by((orgs.c.id == org).desc()).limit(1)
    return (await conn.execute(ordered)).one_or_none()


async def _find_all(conn: AsyncConnection, email: str) -> list[Any]:
    """Find the live users of an e-mail address, the oldest first, MOST_ORGS at most."""
    domain = email.rpartition("@")[2]
    found = _live().where(domain_of(users.c.email) == domain, users.c.email == email)
    found = found.order_by(users.c.id).limit(MOST_ORGS)
    return list((await conn.execute(found)).all())


def _live() -> sa.Select[Any]:
    joined = users.join(orgs, users.c.org_id == orgs.c.id)
    columns = (users.c.id, users.c.org_id, users.c.password_hash, orgs.c.name.label("org_name"))
    found = sa.select(*columns).select_from(joined)
    return found.where(users.c.archived_at.is_(None), orgs.c.archived_at.is_(None))
