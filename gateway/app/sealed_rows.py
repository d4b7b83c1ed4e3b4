"""Seals what stands unsealed in Postgres, or under an older secret: all columns that hold what
tenants wrote and were answered, for longer than a day.

Workers seal what was stored before its columns were sealed, in the background. `tollgate secret
reseal` walks all of it after a new secret was put first. What lives for a day at most (events of
responses, answers to idempotency keys, asked arguments) is left to expire.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.periodic import Periodic
from gateway.batches import sealing as batches
from gateway.columns import SealedColumns, count_left, seal_some
from gateway.db import DATABASE_ERRORS
from gateway.files import sealing as files
from gateway.installation import items as installation
from gateway.request_log import content_log as requests
from gateway.responses import sealing as responses
from gateway.secret import Cipher, Secret
from gateway.settings.sealed_keys import PURPOSE
from gateway.worker.resources import Resources

log = logging.getLogger(__name__)

ALL: tuple[SealedColumns, ...] = (
    *(files.CHUNKS, files.NAMES),
    *(batches.REQUESTS, batches.ANSWERS, batches.METADATA, batches.ERRORS),
    *(responses.CONTENT, responses.CONVERSATION_METADATA, responses.ITEMS),
    installation.SEALED,
    requests.CONTENT,
)
ONCE_UNSEALED = tuple(
    it for it in ALL if it.purpose not in (responses.PURPOSE, PURPOSE, requests.PURPOSE)
)
"""Their rows were not sealed in older versions."""
INTERVAL_S = 600.0


class ResealResult(msgspec.Struct, frozen=True, kw_only=True):
    num_sealed: int
    unreadable: dict[str, str] = {}
    """Rows that do not open, and why."""
    num_held: dict[str, int] = {}
    """How many rows are left of a table because others changed them just then, or wrote them under
    an older secret; of a rotation alone."""

    @property
    def is_whole(self) -> bool:
        return not self.unreadable and not self.num_held


async def reseal(db: AsyncEngine, secret: Secret) -> ResealResult:
    """Seal all rows that are not sealed, or under an older secret. Idempotent; what a kill cut
    short is gone on with by a repeat. `db`: of a role that sees every org's rows.

    Raises: DATABASE_ERRORS.
    """
    num_sealed, unreadable, num_held = 0, dict[str, str](), dict[str, int]()
    for found, cipher in _ciphers(secret, ALL):
        done = await _walk(db, found, cipher, is_rotation=True)
        num_sealed += done.num_sealed
        unreadable |= done.unreadable
        async with db.connect() as conn:
            num_left = await count_left(conn, found, cipher) - len(done.unreadable)
        if num_left > 0:
            num_held[found.table.name] = num_held.get(found.table.name, 0) + num_left
    return ResealResult(num_sealed=num_sealed, unreadable=unreadable, num_held=num_held)


async def seal_unsealed(db: AsyncEngine, secret: Secret) -> int:
    """Seal the rows that are not sealed; return how many. As `reseal` in all else."""
    num_sealed = 0
    for found, cipher in _ciphers(secret, ONCE_UNSEALED):
        done = await _walk(db, found, cipher, is_rotation=False)
        num_sealed += done.num_sealed
    if num_sealed:
        log.info("%d rows of an older version were sealed", num_sealed)
    return num_sealed


def periodic_sealing(db: AsyncEngine, secret: Secret) -> Periodic:
    """Return the walk over what is not sealed, which each worker repeats: while some are of an
    older version, they go on to write it. `db`: as for `reseal`."""
    return Periodic(
        "seal what is stored",
        INTERVAL_S,
        lambda: seal_unsealed(db, secret),
        log=log,
        failure="not all that is stored is sealed",
        expected=DATABASE_ERRORS,
    )


def start_sealing(resources: Resources) -> None:
    sealing = periodic_sealing(resources.system_db, resources.secret)
    sealing.start()
    resources.stack.push_async_callback(sealing.close)


def _ciphers(
    secret: Secret, found: tuple[SealedColumns, ...]
) -> Iterator[tuple[SealedColumns, Cipher]]:
    ciphers = {purpose: Cipher(secret, purpose) for purpose in {it.purpose for it in found}}
    return ((it, ciphers[it.purpose]) for it in found)


async def _walk(
    db: AsyncEngine, found: SealedColumns, cipher: Cipher, *, is_rotation: bool
) -> ResealResult:
    num_sealed, unreadable, after = 0, dict[str, str](), None
    while True:
        async with db.begin() as conn:
            some = await seal_some(conn, found, cipher, after=after, is_rotation=is_rotation)
        num_sealed += some.num_sealed
        unreadable |= some.unreadable
        after = some.last
        if after is None:
            return ResealResult(num_sealed=num_sealed, unreadable=unreadable)
