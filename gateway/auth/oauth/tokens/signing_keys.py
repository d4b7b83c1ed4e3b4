"""The keys that sign our tokens: one at a time, published before it signs and after.

A key is first *next* (published, so that caches of our key set have it in time; it signs nothing),
then *active* (it signs), then *retired* (it verifies until what it signed has expired). Private
keys are stored encrypted. Every process has a copy of the keys, a `KeyRing`, and reads it again
every RELOAD_S. Until then it may sign with a key that was retired meanwhile, so a retired key
verifies for longer than the lifetime of a token. A revoked key may be stolen: that reaches every
process within a second, as revocations do (`withdraw`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from joserfc.jwk import KeyParameters, RSAKey
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from foundation.periodic import Periodic
from gateway.audit.log import ROTATION, record
from gateway.auth.errors import AuthUnavailable
from gateway.auth.tables import signing_keys
from gateway.db import DATABASE_ERRORS
from gateway.secret import Cipher, UnknownSecret
from gateway.tenancy.changes import unchecked
from gateway.tenancy.errors import NotFound, TenancyError
from gateway.tenancy.orgs import find_operator
from gateway.worker.work_listener import WorkListener

log = logging.getLogger(__name__)

ALGORITHM = "RS256"
KEY_BITS = 2048
JWKS_MAX_AGE_S = 300
"""Caches may keep our key set for so long, so a key is published for as long before it signs."""
ROTATE_AFTER_S = 30 * 24 * 3600.0
"""The age of an active key at which it is rotated."""
RELOAD_S = 10.0
HEARD_RELOAD_S = 120.0
"""A process reloads so rarely that hears of each change as it is committed."""
WORK = "signing keys"
"""The topic of the trigger on signing keys."""
RETRY_S = 1.0
MIN_RELOAD_INTERVAL_S = 1.0
"""Unknown key ids cause at most one read of Postgres in this time."""
VERIFY_FOR_S = 900.0
"""A retired key verifies for so long: a token's ten minutes, HEARD_RELOAD_S, and clock skew."""
MAX_RING = 64
ROTATION_LOCK = 0x7369676E_6B657973
"""Postgres advisory lock: "signkeys" in ASCII."""
PURPOSE = "signing-keys"
"""The purpose for which `Secret` derives the key that encrypts private keys."""


class SigningKeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its private part."""

    kid: str
    created_at: datetime
    activated_at: datetime | None
    retired_at: datetime | None
    verify_until: datetime | None

    @property
    def state(self) -> str:
        if self.retired_at is not None:
            return "retired"
        return "next" if self.activated_at is None else "active"


class TooSoon(TenancyError):
    """The next key has not been published for long enough; it will be in `retry_after_s`."""

    constant = "the next key has not been published for long enough"

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("kid", f"the next key signs in {retry_after_s:.0f} s at the earliest")
        self.retry_after_s = retry_after_s


class Ring(msgspec.Struct, frozen=True, kw_only=True):
    """The keys as Postgres had them at one moment."""

    active: RSAKey
    verifying: Mapping[str, RSAKey]
    """The public keys by id: next, active and retired."""
    signing: Mapping[str, RSAKey]
    """The private keys by id: active and retired, for a response that must be repeated."""

    def jwks(self) -> dict[str, Any]:
        """Return the JWK Set (RFC 7517, section 5), without private parts."""
        return {
            "keys": [
                key.as_dict(private=False, kid=kid, use="sig", alg=ALGORITHM)
                for kid, key in self.verifying.items()
            ]
        }


async def ensure_keys(conn: AsyncConnection, cipher: Cipher, now: datetime) -> list[str]:
    """Create an active and a next key if there are none; return the ids of the created ones.

    A lock keeps several gateways from doing so at once.
    """
    made: list[str] = []
    await _lock(conn)
    rows = await _live_rows(conn)
    states = {row.state for row in rows}
    if "active" not in states:
        # It may sign at once: no cache of our key set can need it earlier than now.
        ahead = next((row for row in rows if row.state == "next"), None)
        if ahead is None:
            made.append(await _add(conn, cipher, now, activated_at=now))
        else:
            await _update(conn, ahead.kid, activated_at=now)
            states.discard("next")
    if "next" not in states:
        made.append(await _add(conn, cipher, now))
    return made


async def rotate(
    conn: AsyncConnection, cipher: Cipher, now: datetime, *, older_than_s: float = 0.0
) -> SigningKeyRow | None:
    """Activate the next key, retire the active one, and publish a new next one.

    None: the active key is not older than `older_than_s`. Raises: TooSoon.
    """
    await ensure_keys(conn, cipher, now)
    rows = {row.state: row for row in await _live_rows(conn)}
    active, ahead = rows["active"], rows["next"]
    assert active.activated_at is not None
    if (now - active.activated_at).total_seconds() < older_than_s:
        return None
    published_s = (now - ahead.created_at).total_seconds()
    if published_s < JWKS_MAX_AGE_S:
        raise TooSoon(JWKS_MAX_AGE_S - published_s)
    await _retire(conn, active.kid, now, VERIFY_FOR_S)
    await _update(conn, ahead.kid, activated_at=now)
    await _add(conn, cipher, now)
    return msgspec.structs.replace(ahead, activated_at=now)


async def revoke(
    conn: AsyncConnection,
    cipher: Cipher,
    kid: str,
    now: datetime,
    *,
    check: Callable[[SigningKeyRow], None] = unchecked,
) -> SigningKeyRow:
    """Revoke a key that may be stolen: it verifies nothing from now on. Idempotent. An active key
    is replaced at once.

    Raises: NotFound, what `check` raises.
    """
    await _lock(conn)
    found = sa.select(*public_columns()).where(signing_keys.c.kid == kid)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("kid", f"no signing key {kid!r}")
    before = SigningKeyRow(**row._mapping)
    check(before)
    if before.verify_until is not None and before.verify_until <= now:
        return before
    await _retire(conn, kid, before.retired_at or now, 0.0, verify_until=now)
    await ensure_keys(conn, cipher, now)
    return msgspec.structs.replace(before, retired_at=before.retired_at or now, verify_until=now)


def public_columns() -> list[sa.ColumnElement[Any]]:
    return [signing_keys.c[field] for field in SigningKeyRow.__struct_fields__]


async def _lock(conn: AsyncConnection) -> None:
    await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(ROTATION_LOCK)))


async def _live_rows(conn: AsyncConnection) -> list[SigningKeyRow]:
    live = sa.select(*public_columns()).where(signing_keys.c.retired_at.is_(None))
    return [SigningKeyRow(**row._mapping) for row in await conn.execute(live)]


async def _add(
    conn: AsyncConnection, cipher: Cipher, now: datetime, *, activated_at: datetime | None = None
) -> str:
    # It takes 50 ms, so it runs in a thread. Ids sort by age.
    key = await asyncio.to_thread(RSAKey.generate_key, KEY_BITS)
    kid = f"{int(now.timestamp() * 1000):012x}{key.thumbprint()[:12]}"
    sealed = cipher.seal(key.as_der(private=True), kid.encode())
    await conn.execute(
        sa.insert(signing_keys).values(
            kid=kid,
            public_jwk=key.as_dict(private=False),
            private_key=sealed.data,
            secret_id=sealed.secret_id,
            created_at=now,
            activated_at=activated_at,
        )
    )
    return kid


async def _note(conn: AsyncConnection, action: str, kids: list[str]) -> None:
    """Record an automatic change of keys in the operator's audit log."""
    operator = await find_operator(conn)
    if operator is None:
        return
    for kid in kids:
        await record(conn, org_id=operator, actor=ROTATION, action=action, target=kid)


async def _update(conn: AsyncConnection, kid: str, **values: Any) -> None:
    await conn.execute(sa.update(signing_keys).where(signing_keys.c.kid == kid).values(**values))


async def _retire(
    conn: AsyncConnection,
    kid: str,
    retired_at: datetime,
    verify_for_s: float,
    *,
    verify_until: datetime | None = None,
) -> None:
    until = verify_until or retired_at + timedelta(seconds=verify_for_s)
    await _update(conn, kid, retired_at=retired_at, verify_until=until)
    if verify_until is not None:
        await _update(conn, kid, private_key=None)


async def read_ring(
    conn: AsyncConnection, cipher: Cipher, now: datetime, *, before: Ring | None = None
) -> Ring:
    """Read all keys. Those in `before` are reused: importing a private key blocks the event loop
    for some 50 ms, and a key id always names the same key.

    Raises: AuthUnavailable if no key can sign.
    """
    alive = sa.or_(signing_keys.c.verify_until.is_(None), signing_keys.c.verify_until > now)
    found = sa.select(signing_keys).where(alive).order_by(signing_keys.c.kid.desc()).limit(MAX_RING)
    verifying: dict[str, RSAKey] = {}
    signing: dict[str, RSAKey] = {}
    active: RSAKey | None = None
    verified: Mapping[str, RSAKey] = {} if before is None else before.verifying
    signed: Mapping[str, RSAKey] = {} if before is None else before.signing
    for row in await conn.execute(found):
        parameters: KeyParameters = {"kid": row.kid, "use": "sig", "alg": ALGORITHM}
        public = verified.get(row.kid) or RSAKey.import_key(row.public_jwk, parameters)
        verifying[row.kid] = public
        if row.activated_at is None:
            continue
        try:
            private = cipher.open(row.private_key, row.kid.encode(), row.secret_id)
        except UnknownSecret:
            log.error("signing key %s is encrypted under a secret that is gone", row.kid)
            continue
        signing[row.kid] = signed.get(row.kid) or RSAKey.import_key(private, parameters)
        if row.retired_at is None:
            active = signing[row.kid]
    if active is None:
        raise AuthUnavailable("no signing key")
    return Ring(active=active, verifying=verifying, signing=signing)


class KeyRing:
    """The keys that one process knows. `db`: the system pool. `clock`: Unix seconds; `monotonic`:
    monotonic seconds, for intervals."""

    def __init__(
        self,
        db: AsyncEngine,
        cipher: Cipher,
        *,
        listener: WorkListener | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._db = db
        self.cipher = cipher
        self._clock = clock
        self._monotonic = monotonic
        self.on_withdrawn: Callable[[], None] = lambda: None
        """Called when a known key is no longer valid."""
        self._withdrawn: set[str] = set()
        """The ids of revoked keys: a read that began before may still show them."""
        self._ring: Ring | None = None
        self._read_at = -MIN_RELOAD_INTERVAL_S
        self._reading = asyncio.Lock()
        self._failing = False
        self._work_listener = listener
        if listener is not None:
            listener.watch(WORK, lambda: self._reloads.wake())
        self._reloads = Periodic(
            "signing keys",
            self._pause_s,
            self._rotate_and_reload,
            log=log,
            failure="signing keys cannot be read",
            at_once=False,
        )

    def _pause_s(self) -> float:
        if self._failing:
            return RETRY_S
        hears = self._work_listener is not None and self._work_listener.is_hearing
        return HEARD_RELOAD_S if hears else RELOAD_S

    def now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)

    async def start(self) -> None:
        """Start to read the keys. Without Postgres it starts too, and goes on trying."""
        try:
            async with self._db.begin() as conn:
                made = await ensure_keys(conn, self.cipher, self.now())
                await _note(conn, "signing_key.created", made)
            await self.reload()
        except (*DATABASE_ERRORS, AuthUnavailable) as error:
            log.error("signing keys cannot be read (%s)", type(error).__name__)
        self._failing = self._ring is None
        self._reloads.start()

    async def close(self) -> None:
        await self._reloads.close()

    @property
    def ring(self) -> Ring:
        """The keys. Raises: AuthUnavailable before the first read, and while the active key is
        revoked and its successor not yet read."""
        if self._ring is None:
            raise AuthUnavailable("signing keys have not been read yet")
        if self._ring.active.kid in self._withdrawn:
            raise AuthUnavailable("the signing key was revoked")
        return self._ring

    def withdraw(self, kid: str) -> None:
        """Drop a key that was revoked: in this process it verifies and signs nothing more."""
        if kid in self._withdrawn:
            return
        self._withdrawn.add(kid)
        self._reloads.wake()
        if self._ring is not None:
            self._take(self._ring)

    async def verifier(self, kid: str) -> RSAKey | None:
        """Return the public key with this id. An unknown one is read from Postgres, at a bounded
        rate."""
        if self._ring is not None and kid in self._ring.verifying:
            return self._ring.verifying[kid]
        async with self._reading:
            if self._monotonic() - self._read_at < MIN_RELOAD_INTERVAL_S:
                return None if self._ring is None else self._ring.verifying.get(kid)
            try:
                await self._read()
            except DATABASE_ERRORS as error:
                raise AuthUnavailable(type(error).__name__) from error
        return self.ring.verifying.get(kid)

    async def reload(self) -> None:
        """Raises: DATABASE_ERRORS, AuthUnavailable."""
        async with self._reading:
            await self._read()

    async def _read(self) -> None:
        self._read_at = self._monotonic()
        async with self._db.connect() as conn:
            found = await read_ring(conn, self.cipher, self.now(), before=self._ring)
        self._take(found)

    def _take(self, found: Ring) -> None:
        """Replace the ring, leaving out withdrawn keys."""
        verifying, signing = (
            {kid: key for kid, key in keys.items() if kid not in self._withdrawn}
            for keys in (found.verifying, found.signing)
        )
        before = self._ring
        self._ring = Ring(active=found.active, verifying=verifying, signing=signing)
        if before is not None and not before.verifying.keys() <= verifying.keys():
            self.on_withdrawn()

    async def _rotate_and_reload(self) -> None:
        was_failing, self._failing = self._failing, True
        try:
            await self._rotate_when_due()
            await self.reload()
            self._failing = False
        except (*DATABASE_ERRORS, AuthUnavailable) as error:
            if not was_failing:
                log.error("signing keys cannot be read (%s)", type(error).__name__)

    async def _rotate_when_due(self) -> None:
        async with self._db.begin() as conn:
            due = sa.select(signing_keys.c.kid).where(
                signing_keys.c.retired_at.is_(None),
                signing_keys.c.activated_at < self.now() - timedelta(seconds=ROTATE_AFTER_S),
            )
            if await conn.scalar(due) is None and self._ring is not None:
                return
            try:
                row = await rotate(conn, self.cipher, self.now(), older_than_s=ROTATE_AFTER_S)
                await _note(conn, "signing_key.rotated", [] if row is None else [row.kid])
            except TooSoon:
                log.info("a signing key is due, but the next one is not published for long enough")
