"""Passkeys (WebAuthn Level 3): a signed-in user registers one, and can then sign in with it alone.

A passkey is the only factor, so the authenticator must verify its user each time. A challenge is
bound to the browser that requested it, lasts minutes, and is good once, which Redis remembers. No
attestation is required: any authenticator will do.
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
"""The maximum of one user."""
POSSESSION = ("pop", "user")
"""The `amr` of a login by passkey (RFC 8176): proof of possession, and user presence."""
REGISTER, SIGN_IN = "passkey.register", "passkey.sign_in"
USED = "tollgate:passkey:used"
MALFORMED = (ValueError, KeyError, TypeError, RecursionError)
"""The errors that a malformed response raises, or one that is nested too deep."""


class InvalidPasskey(Exception):
    """The passkey was refused; the text is for the log."""


class Passkey(msgspec.Struct, frozen=True, kw_only=True):
    """A passkey as its user may see it."""

    id: str
    name: str
    created_at: datetime
    last_used_at: datetime | None


COLUMNS = [passkeys.c[name] for name in Passkey.__struct_fields__]


class Passkeys:
    """The passkeys of one relying party: the host of `public_url`, from pages of its origin
    alone."""

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
        """Load the library at the first use: it is large, and many gateways have no passkeys."""
        from gateway.auth.login.passkey_ceremonies import Ceremonies

        return Ceremonies(self._public_url)

    async def list(self, session: Session) -> list[Passkey]:
        async with tenant(self._db, session.org_id) as conn:
            rows = await conn.execute(_of(session, *COLUMNS).order_by(passkeys.c.id))
            return [Passkey(**row._mapping) for row in rows]

    async def registration_options(self, session: Session, cookie: str) -> str:
        """Return the JSON for `navigator.credentials.create()`."""
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
        """Raises: InvalidPasskey, InvalidField (the name, or too many passkeys)."""
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
            # The lock keeps registrations of one user from passing the maximum together.
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
            archived = sa.update(passkeys).where(passkeys.c.id == passkey_id, *_owned(session))
            archived = archived.values(archived_at=sa.func.now())
            if (await conn.execute(archived)).rowcount == 0:
                raise NotFound("passkey_id", "no such passkey")
            await record(
                conn,
                org_id=session.org_id,
                actor=actor,
                action="passkey.archived",
                target=passkey_id,
            )

    def sign_in_options(self, cookie: str) -> str:
        """Return the JSON for `navigator.credentials.get()`. It names no account: the passkey
        does."""
        challenge = self._seals.challenge(cookie, SIGN_IN, self._clock())
        return self._ceremonies.sign_in_options(challenge)

    async def sign_in(
        self, cookie: str, credential: Any, *, org_id: str | None, origin: LoginOrigin
    ) -> SignedIn:
        """Sign in by passkey. `org_id`: the org that the user must belong to; None: any org.

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
            # A counter that changed meanwhile was another response with the same key: a copy of it.
            counted = sa.update(passkeys).where(passkeys.c.id == row.id)
            counted = counted.where(passkeys.c.sign_count == row.sign_count)
            counted = counted.where(passkeys.c.archived_at.is_(None))
            values = {"sign_count": sign_count, "last_used_at": sa.func.now()}
            if (await conn.execute(counted.values(**values))).rowcount == 0:
                raise WrongCredentials
            return await self._login.start(conn, row.org_id, row.user_id, POSSESSION, origin)

    def _challenge_in(self, credential: Any, cookie: str, purpose: str) -> bytes:
        """Return the signed challenge, if it was issued to this browser. Raises: InvalidPasskey."""
        try:
            challenge = self._ceremonies.challenge_in(credential)
        except (*MALFORMED, AttributeError) as error:
            raise InvalidPasskey("no challenge") from error
        if not self._seals.is_challenge(challenge, cookie, purpose, now=self._clock()):
            raise InvalidPasskey("not this browser's challenge, or an old one")
        return challenge

    async def _use(self, challenge: bytes) -> None:
        """Mark the challenge as used. Raises: InvalidPasskey the second time."""
        key = f"{USED}:{hashlib.sha256(challenge).hexdigest()}"
        if not await self._redis.set(key, b"1", nx=True, ex=CHALLENGE_LIFETIME_S):
            raise InvalidPasskey("the challenge was used before")


def _owned(session: Session) -> tuple[sa.ColumnElement[bool], ...]:
    c = passkeys.c
    return c.org_id == session.org_id, c.user_id == session.user_id, c.archived_at.is_(None)


def _of(session: Session, *columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    return sa.select(*columns).where(*_owned(session))


async def _find(conn: AsyncConnection, credential_id: str) -> Any:
    """Find a live passkey of a live user of a live org."""
    if "\0" in credential_id:
        return None
    joined = passkeys.join(users, passkeys.c.user_id == users.c.id)
    joined = joined.join(orgs, passkeys.c.org_id == orgs.c.id)
    found = sa.select(passkeys).select_from(joined)
    found = found.where(passkeys.c.credential_id == credential_id)
    for table in (passkeys, users, orgs):
        found = found.where(table.c.archived_at.is_(None))
    return (await conn.execute(found)).one_or_none()
