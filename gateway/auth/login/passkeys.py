"""Passkeys (WebAuthn Level 3): registered by somebody who is signed in, and then enough to sign in.

A passkey stands alone, so the authenticator has to verify its user each time. A challenge is bound
to the browser that asked for it and lasts minutes; that it is used but once is kept on Redis. No
attestation is asked for: any authenticator will do. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa
from redis.asyncio import Redis
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.log import Actor, record
from gateway.auth.login.login import Login, LoginOrigin, SignedIn, WrongCredentials
from gateway.auth.login.sessions import CHALLENGE_LIFETIME_S, Seals, Session
from gateway.auth.tables import passkeys
from gateway.db import tenant
from gateway.ids import uuid7
from gateway.tenancy.errors import InvalidField, NotFound
from gateway.tenancy.member_tables import users
from gateway.tenancy.tables import check_name, orgs

if TYPE_CHECKING:
    from gateway.auth.login.passkey_ceremonies import Ceremonies

MAX_PASSKEYS = 16
"""Of one user."""
POSSESSION = ("pop", "user")
"""RFC 8176: a key was shown to be held, and its holder to be there."""
REGISTER, SIGN_IN = "passkey.register", "passkey.sign_in"
USED = "tollgate:passkey:used"
MALFORMED = (ValueError, KeyError, TypeError, RecursionError)
"""What becomes of an answer that is none, or is nested deeper than anybody reads."""


class InvalidPasskey(Exception):
    """Its text is for the log."""


class Passkey(msgspec.Struct, frozen=True, kw_only=True):
    """A passkey as its user may see it."""

    id: str
    name: str
    created_at: datetime
    last_used_at: datetime | None


COLUMNS = [passkeys.c[name] for name in Passkey.__struct_fields__]


class Passkeys:
    """One per process. `public_url`: the relying party is its host, and no page of another origin
    may ask."""

    def __init__(
        self,
        *,
        db: AsyncEngine,
        system_db: AsyncEngine,
        redis: Redis,
        seals: Seals,
        login: Login,
        public_url: str,
        clock: Callable[[], datetime],
    ) -> None:
        self._db = db
        self._system_db = system_db
        self._redis = redis
        self._seals = seals
        self._login = login
        self._clock = clock
        self._public_url = public_url

    @cached_property
    def _ceremonies(self) -> Ceremonies:
        """Load the library with the first passkey: it is large, and many a gateway holds none."""
        from gateway.auth.login.passkey_ceremonies import Ceremonies

        return Ceremonies(self._public_url)

    async def list(self, session: Session) -> list[Passkey]:
        async with tenant(self._db, session.org_id) as conn:
            rows = await conn.execute(_of(session, *COLUMNS).order_by(passkeys.c.id))
            return [Passkey(**row._mapping) for row in rows]

    async def registration_options(self, session: Session, cookie: str) -> str:
        """The JSON for `navigator.credentials.create()`."""
        async with tenant(self._db, session.org_id) as conn:
            known = await conn.scalars(_of(session, passkeys.c.credential_id))
        return self._ceremonies.registration_options(
            user_id=session.user_id,
            user_name=session.email,
            display_name=session.name,
            challenge=self._seals.challenge(cookie, REGISTER, self._clock()),
            known=known,
        )

    async def register(
        self, session: Session, cookie: str, credential: Any, *, name: str, actor: Actor
    ) -> Passkey:
        """Raises: InvalidPasskey, InvalidField (name, or there are too many)."""
        label = check_name(name)
        challenge = self._challenge_in(credential, cookie, REGISTER)
        try:
            verified = self._ceremonies.verify_registration(credential, challenge)
        except MALFORMED as error:
            raise InvalidPasskey(type(error).__name__) from error
        await self._use(challenge)
        row: dict[str, Any] = {
            "id": f"passkey_{uuid7().hex}",
            "org_id": session.org_id,
            "user_id": session.user_id,
            "credential_id": verified.credential_id,
            "public_key": verified.public_key,
            "sign_count": verified.sign_count,
            "name": label,
        }
        async with tenant(self._db, session.org_id) as conn:
            # One at a time for each user, so that they are counted.
            owner = sa.select(users.c.id).where(users.c.id == session.user_id)
            await conn.execute(owner.with_for_update(key_share=True))
            known = (await conn.scalars(_of(session, passkeys.c.id))).all()
            if len(known) >= MAX_PASSKEYS:
                raise InvalidField("passkeys", f"must be at most {MAX_PASSKEYS}")
            added = insert(passkeys).values(**row).on_conflict_do_nothing().returning(*COLUMNS)
            made = (await conn.execute(added)).one_or_none()
            if made is None:
                raise InvalidPasskey("registered before")
            await record(
                conn,
                org_id=session.org_id,
                actor=actor,
                action="passkey.created",
                target=row["id"],
                after={"name": label, "user_id": session.user_id},
            )
        return Passkey(**made._mapping)

    async def remove(self, session: Session, passkey_id: str, *, actor: Actor) -> None:
        """Raises: NotFound."""
        async with tenant(self._db, session.org_id) as conn:
            mine = sa.update(passkeys).where(passkeys.c.id == passkey_id)
            mine = mine.where(*_owned(session)).values(archived_at=sa.func.now())
            if (await conn.execute(mine)).rowcount == 0:
                raise NotFound("passkey_id", "no such passkey")
            await record(
                conn,
                org_id=session.org_id,
                actor=actor,
                action="passkey.archived",
                target=passkey_id,
            )

    def sign_in_options(self, cookie: str) -> str:
        """The JSON for `navigator.credentials.get()`: no account is named, the passkey does."""
        challenge = self._seals.challenge(cookie, SIGN_IN, self._clock())
        return self._ceremonies.sign_in_options(challenge)

    async def sign_in(
        self, cookie: str, credential: Any, *, org_id: str | None, where: LoginOrigin
    ) -> SignedIn:
        """Sign in by passkey; `org_id`: whose users alone may; None: anybody's.

        Raises: WrongCredentials.
        """
        try:
            challenge = self._challenge_in(credential, cookie, SIGN_IN)
            async with self._system_db.connect() as conn:
                row = await _find(conn, str(credential["id"]))
            if row is None or org_id not in (None, row.org_id):
                raise WrongCredentials
            sign_count = self._ceremonies.verify_sign_in(
                credential, challenge, public_key=row.public_key, sign_count=row.sign_count
            )
            await self._use(challenge)
        except (InvalidPasskey, *MALFORMED) as error:
            raise WrongCredentials from error
        async with tenant(self._db, row.org_id) as conn:
            # A counter that went on meanwhile was another's answer with the same key: a copy.
            counted = sa.update(passkeys).where(passkeys.c.id == row.id)
            counted = counted.where(passkeys.c.sign_count == row.sign_count)
            counted = counted.where(passkeys.c.archived_at.is_(None))
            values = {"sign_count": sign_count, "last_used_at": sa.func.now()}
            if (await conn.execute(counted.values(**values))).rowcount == 0:
                raise WrongCredentials
            return await self._login.start(conn, row.org_id, row.user_id, POSSESSION, where)

    def _challenge_in(self, credential: Any, cookie: str, purpose: str) -> bytes:
        """The challenge that was signed, if this browser was given it. Raises: InvalidPasskey."""
        try:
            challenge = self._ceremonies.challenge_in(credential)
        except (*MALFORMED, AttributeError) as error:
            raise InvalidPasskey("no challenge") from error
        if not self._seals.is_challenge(challenge, cookie, purpose, now=self._clock()):
            raise InvalidPasskey("not this browser's challenge, or an old one")
        return challenge

    async def _use(self, challenge: bytes) -> None:
        """Raises: InvalidPasskey the second time."""
        key = f"{USED}:{hashlib.sha256(challenge).hexdigest()}"
        if not await self._redis.set(key, b"1", nx=True, ex=CHALLENGE_LIFETIME_S):
            raise InvalidPasskey("a challenge that was answered before")


def _owned(session: Session) -> tuple[sa.ColumnElement[bool], ...]:
    c = passkeys.c
    mine = (c.org_id == session.org_id, c.user_id == session.user_id)
    return (*mine, c.archived_at.is_(None))


def _of(session: Session, *columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    return sa.select(*columns).where(*_owned(session))


async def _find(conn: AsyncConnection, credential_id: str) -> Any:
    """A live one of a live user of a live org."""
    if "\0" in credential_id:
        return None
    joined = passkeys.join(users, passkeys.c.user_id == users.c.id)
    joined = joined.join(orgs, passkeys.c.org_id == orgs.c.id)
    found = sa.select(passkeys).select_from(joined)
    found = found.where(passkeys.c.credential_id == credential_id)
    for table in (passkeys, users, orgs):
        found = found.where(table.c.archived_at.is_(None))
    return (await conn.execute(found)).one_or_none()
