"""Idempotency keys in Postgres: who was first with one, and what he was answered.

A claim is one row of (org, principal, key). Whoever inserts it carries the request out; who comes
later gets his answer, or is told to wait. A claim whose worker died is taken over after
`CLAIM_TIMEOUT_S`, which is longer than a handler may run. Before that the audit log is asked for
the dead request's id: its entry stands in the transaction of the change, so an effect that was
committed is never repeated, even where the answer was lost. A worker that was only frozen, with its
clock or beyond its timeout, may wake up after that: its request asks `Claim.check` behind the same
lock, the head of the org's chain, under which the claim was taken over, and changes nothing more.

Answers hold new keys, so they are sealed: AES-256-GCM under a key derived from the installation's
secret, bound to the claim. All times are Postgres' own.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import timedelta
from typing import Any

import msgspec
import sqlalchemy as sa
from cryptography.exceptions import InvalidTag
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.corrections.superseded_requests import supersede
from foundation.periodic import Periodic
from gateway.audit.tables import entries, heads
from gateway.db import tenant
from gateway.request_errors import AnswerLost, OtherBody, OtherRequest, RequestInFlight
from gateway.secret import Cipher, Secret, UnknownSecret
from gateway.tenancy.tables import idempotency_keys as table

log = logging.getLogger(__name__)

PURPOSE = "idempotency-answers"
"""`Secret` derives the key of the cipher for this purpose."""
LIFETIME_S = 24 * 3600
CLAIM_TIMEOUT_S = 120.0
ALIVE_S = 30.0
"""A generation runs for as long as it takes, and says so (`renew`) several times in that."""
HANDLER_TIMEOUT_S = 60.0
"""Then the request is given up; what its transaction did is undone."""
SWEEP_INTERVAL_S = 600.0
SWEEP_BATCH = 1000
MAX_ATTEMPTS = 3
"""A row can be swept between two looks at it."""
LOST = 599
"""The status of an answer that is not kept, of what was billed; nobody is answered that."""
CLAIM = "idempotency_claim"
"""Key in a request's state."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """`principal`: the credential and whom it acts for. Digests are SHA-256."""

    org_id: str
    principal: str
    key_digest: bytes
    request_digest: bytes
    """A digest of method, path, query and body."""
    request_id: str
    generates: bool = False
    """It changes nothing but the bill, and is carried out anew where its worker died."""

    @property
    def where(self) -> sa.ColumnElement[bool]:
        return sa.and_(
            table.c.org_id == self.org_id,
            table.c.principal == self.principal,
            table.c.key_digest == self.key_digest,
        )

    @property
    def is_mine(self) -> sa.ColumnElement[bool]:
        """Select the row of this claim, if it was not taken over."""
        return sa.and_(self.where, table.c.request_id == self.request_id)

    async def check(self, conn: AsyncConnection) -> None:
        """Check that this request may still change something; for `audit.log.Actor.still_may`.

        Raises: RequestInFlight, where another request has taken the claim over.
        """
        holder = await conn.scalar(sa.select(table.c.request_id).where(self.where))
        if holder != self.request_id:
            raise RequestInFlight

    @property
    def bound(self) -> bytes:
        """The context that a sealed answer is bound to."""
        named = hashlib.sha256(f"{self.org_id}\n{self.principal}".encode()).digest()
        return named + self.key_digest + self.request_digest


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class IdempotencyKeys:
    """One per process. `db` acts as the tenant, `system_db` as the system."""

    def __init__(self, *, db: AsyncEngine, system_db: AsyncEngine, secret: Secret) -> None:
        self._db = db
        self._system_db = system_db
        self._cipher = Cipher(secret, PURPOSE)

    async def claim(self, claim: Claim) -> Answer | None:
        """Claim the key and return None: carry it out, then `settle`. Else what it was answered.

        Raises: RequestInFlight, OtherRequest, AnswerLost.
        """
        fresh = {
            "request_digest": claim.request_digest,
            "request_id": claim.request_id,
            "claimed_at": sa.func.now(),
            "status": None,
            "response": None,
            "secret_id": None,
        }
        added = insert(table).values(
            org_id=claim.org_id, principal=claim.principal, key_digest=claim.key_digest, **fresh
        )
        for _ in range(MAX_ATTEMPTS):
            async with tenant(self._db, claim.org_id) as conn:
                if (await conn.execute(added.on_conflict_do_nothing())).rowcount == 1:
                    return None
                age = sa.extract("epoch", sa.func.now() - table.c.claimed_at).label("age_s")
                found = sa.select(table, age).where(claim.where).with_for_update()
                row = (await conn.execute(found)).one_or_none()
                if row is None:
                    continue
                if row.age_s <= LIFETIME_S:
                    answer = await self._known(conn, claim, row)
                    if answer is not None:
                        return answer
                await conn.execute(sa.update(table).where(claim.where).values(**fresh))
                return None
        raise RequestInFlight

    async def _known(self, conn: AsyncConnection, claim: Claim, row: Any) -> Answer | None:
        """None: its worker died before it changed anything."""
        if row.request_digest != claim.request_digest:
            raise OtherBody if claim.generates else OtherRequest
        if row.status is not None:
            return self._unseal(claim, row)
        if row.age_s <= (ALIVE_S if claim.generates else CLAIM_TIMEOUT_S):
            raise RequestInFlight
        if claim.generates:
            await supersede(
                conn,
                org_id=claim.org_id,
                request_id=row.request_id,
                superseded_by=claim.request_id,
                claimed_at=row.claimed_at,
            )
            return None
        # Whoever is about to commit a change holds the head of the chain: wait, then look.
        head = sa.select(heads.c.sequence).where(heads.c.org_id == claim.org_id)
        await conn.execute(head.with_for_update())
        if await _has_changed_something(conn, claim.org_id, row.request_id):
            raise AnswerLost
        return None

    async def settle(self, claim: Claim, answer: Answer) -> None:
        """Keep what was answered; let go of a key whose request failed and changed nothing, so that
        it can be repeated."""
        async with tenant(self._db, claim.org_id) as conn:
            if answer.status >= 400 and not await _has_changed_something(
                conn, claim.org_id, claim.request_id
            ):
                await conn.execute(sa.delete(table).where(claim.is_mine))
                return
            await self._keep(conn, claim, answer)

    async def keep(self, claim: Claim, answer: Answer | None) -> None:
        """Keep what a generation was answered; None: that is lost, and it was billed."""
        kept = answer or Answer(status=LOST, headers=[], body=b"")
        async with tenant(self._db, claim.org_id) as conn:
            await self._keep(conn, claim, kept)

    async def keep_within(self, conn: AsyncConnection, claim: Claim, answer: Answer) -> None:
        """Keep the answer in the transaction that makes what is answered: neither is there without
        the other.

        Raises: RequestInFlight, where another request has taken the claim over.
        """
        if not await self._keep(conn, claim, answer):
            raise RequestInFlight

    async def let_go(self, claim: Claim) -> None:
        """Release a claim that has failed, and nobody was billed: it can be repeated.

        What was kept stays, by a commit whose answer was lost.
        """
        unanswered = table.c.status.is_(None)
        async with tenant(self._db, claim.org_id) as conn:
            await conn.execute(sa.delete(table).where(claim.is_mine, unanswered))

    async def renew(self, claim: Claim) -> None:
        """Renew a claim that still runs."""
        renewed = sa.update(table).where(claim.is_mine, table.c.status.is_(None))
        async with tenant(self._db, claim.org_id) as conn:
            await conn.execute(renewed.values(claimed_at=sa.func.now()))

    async def _keep(self, conn: AsyncConnection, claim: Claim, answer: Answer) -> bool:
        """Keep the answer; True if the claim is still this request's."""
        sealed = self._cipher.seal(msgspec.msgpack.encode(answer), claim.bound)
        kept = {"status": answer.status, "response": sealed.data, "secret_id": sealed.secret_id}
        stored = sa.update(table).where(claim.is_mine).values(**kept)
        if (await conn.execute(stored)).rowcount == 1:
            return True
        log.warning("an idempotency key was taken over while its request ran")
        return False

    async def sweep(self) -> int:
        """Delete what has expired; returns how many."""
        swept = 0
        expired = sa.func.now() - timedelta(seconds=LIFETIME_S)
        old = sa.select(table.c.org_id, table.c.principal, table.c.key_digest)
        old = old.where(table.c.claimed_at < expired).limit(SWEEP_BATCH)
        old = old.with_for_update(skip_locked=True)
        key = sa.tuple_(table.c.org_id, table.c.principal, table.c.key_digest)
        while True:
            async with self._system_db.begin() as conn:
                done = (await conn.execute(sa.delete(table).where(key.in_(old)))).rowcount
            swept += done
            if done < SWEEP_BATCH:
                return swept

    def periodic_sweep(self) -> Periodic:
        """Return the repeated sweep, which runs in every worker."""
        return Periodic(
            "sweep idempotency keys",
            lambda: SWEEP_INTERVAL_S,
            lambda: self.sweep(),
            log=log,
            failure="idempotency keys were not swept",
            expected=(sa.exc.SQLAlchemyError, OSError),
            at_once=False,
        )

    def _unseal(self, claim: Claim, row: Any) -> Answer:
        """Raises: AnswerLost where its key is gone or it was tampered with."""
        if row.status == LOST:
            raise AnswerLost
        try:
            plain = self._cipher.open(row.response, claim.bound, row.secret_id)
        except (UnknownSecret, InvalidTag):
            raise AnswerLost from None
        return msgspec.msgpack.decode(plain, type=Answer)


async def _has_changed_something(conn: AsyncConnection, org_id: str, request_id: str) -> bool:
    made = sa.exists().where(entries.c.org_id == org_id, entries.c.request_id == request_id)
    return bool(await conn.scalar(sa.select(made)))
