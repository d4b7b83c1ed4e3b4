"""Book a batch of transfers, all or none: posted at once, or pending and then posted, voided or
expired; and reversals. `ingest` posts usage, which comes by the thousand.

A pending transfer reserves an amount: it is in the pending balances of both accounts until exactly
one row resolves it. `post` moves some or all of the amount and frees the rest; `void` and `expire`
move nothing. A reversal moves the whole amount back, once. Ids are idempotency keys: repeating a
transfer with the same content succeeds.

The accounts of a batch are locked in the order of their ids before anything is read, as in
`ingest`, so a transaction calls `transfer` only once, and batches never deadlock.

Knows no price and no event.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import Enum
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.money import Pico
from billing.tables import balances, read_struct, to_arrays, transfers

Phase = Literal["posted", "pending", "post", "void", "expire"]
Kind = Literal[
    "usage", "waste", "suspense", "repriced",  # of events: `ingest` and `reconcile` post them
    "credit", "lease", "burn", "expired", "revoked", "returned", "reversed",
]  # fmt: skip
GRANT_PREFIX = "grant:"
"""Accounts with this prefix may never be overdrawn, pending amounts included; the schema checks it
as well."""
MAX_BATCH = 1000
MAX_TRIES = 3
"""A call tries so often: another transaction may use the same id between other accounts."""


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    debit: str
    credit: str
    amount_pico: Pico
    kind: Kind
    phase: Phase = "posted"
    event_id: str | None = None
    resolves: str | None = None
    """The pending transfer that this posts, voids or expires."""
    corrects: str | None = None
    """The transfer that this reverses."""
    expires_at: datetime | None = None
    """From then on a pending transfer may be expired."""

    def post(self, transfer_id: str, amount_pico: Pico) -> Transfer:
        """Make the transfer that moves a part of the pending amount, and frees the rest."""
        return self._resolved(transfer_id, "post", amount_pico)

    def void(self, transfer_id: str) -> Transfer:
        return self._resolved(transfer_id, "void", self.amount_pico)

    def expire(self, transfer_id: str) -> Transfer:
        return self._resolved(transfer_id, "expire", self.amount_pico)

    def reverse(self, transfer_id: str) -> Transfer:
        return Transfer(
            id=transfer_id,
            debit=self.credit,
            credit=self.debit,
            amount_pico=self.amount_pico,
            kind="reversed",
            event_id=self.event_id,
            corrects=self.id,
        )

    def _resolved(self, transfer_id: str, phase: Phase, amount_pico: Pico) -> Transfer:
        return msgspec.structs.replace(
            self,
            id=transfer_id,
            phase=phase,
            amount_pico=amount_pico,
            resolves=self.id,
            expires_at=None,
        )


class TransferStatus(Enum):
    CREATED = "created"
    EXISTS = "exists"
    """It was booked before with the same content, which is a success."""
    EXISTS_WITH_OTHER_CONTENT = "exists_with_other_content"
    NOT_FOUND = "not_found"
    """The transfer that it resolves or reverses does not exist."""
    NOT_PENDING = "not_pending"
    ALREADY_RESOLVED = "already_resolved"
    OTHER_ACCOUNTS = "other_accounts"
    """Its accounts differ from those of the transfer that it resolves or reverses."""
    OTHER_AMOUNT = "other_amount"
    """It posts more than was pending, or voids, expires or reverses less than all."""
    NOT_EXPIRED = "not_expired"
    NOT_POSTED = "not_posted"
    ALREADY_CORRECTED = "already_corrected"
    EXCEEDS_CREDITS = "exceeds_credits"
    """It, or the batch, takes more from a grant than is left."""
    NOT_BOOKED = "not_booked"
    """It is valid, but another transfer of its batch is not."""


GOOD = (TransferStatus.CREATED, TransferStatus.EXISTS)


class _BookedTransfer(msgspec.Struct, frozen=True, kw_only=True):
    transfer: Transfer
    is_resolved: bool
    is_corrected: bool


class _BookState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the books for a batch, under the locks of its accounts."""

    booked: dict[str, _BookedTransfer]
    left_pico: dict[str, Pico]
    """The rest of each grant's account."""
    now: datetime


async def transfer(conn: AsyncConnection, wanted: Sequence[Transfer]) -> list[TransferStatus]:
    """Book the transfers that are not booked yet, or none if one of them is invalid, in the
    caller's transaction, which calls this once. Ids within a batch differ, and no transfer refers
    to another one of the batch."""
    assert len({each.id for each in wanted}) == len(wanted) <= MAX_BATCH
    accounts = sorted({side for each in wanted for side in (each.debit, each.credit)})
    for _ in range(MAX_TRIES):
        async with conn.begin_nested() as attempt:
            await conn.execute(_OPEN, {"accounts": accounts})
            await conn.execute(_LOCK, {"accounts": accounts})
            known = await _read(conn, wanted, accounts)
            statuses = judge(wanted, known)
            fresh = [
                each
                for each, status in zip(wanted, statuses, strict=True)
                if status is TransferStatus.CREATED
            ]
            if not fresh or await _book(conn, fresh) == len(fresh):
                return statuses
            await attempt.rollback()
    raise AssertionError("ids conflict with transfers that do not exist")


def judge(wanted: Sequence[Transfer], known: _BookState) -> list[TransferStatus]:
    statuses = [_judge_one(each, known) for each in wanted]
    left = dict(known.left_pico)
    for each, status in zip(wanted, statuses, strict=True):
        if status is TransferStatus.CREATED:
            for account, more in _taken(each, known):
                left[account] = left.get(account, 0) - more
    for position, each in enumerate(wanted):
        overdrawn = min(left.get(each.debit, 0), left.get(each.credit, 0)) < 0
        if statuses[position] is TransferStatus.CREATED and overdrawn:
            statuses[position] = TransferStatus.EXCEEDS_CREDITS
    if all(status in GOOD for status in statuses):
        return statuses
    created, not_booked = TransferStatus.CREATED, TransferStatus.NOT_BOOKED
    return [not_booked if status is created else status for status in statuses]


def _judge_one(one: Transfer, known: _BookState) -> TransferStatus:
    earlier = known.booked.get(one.id)
    if earlier is not None:
        same = earlier.transfer == one
        return TransferStatus.EXISTS if same else TransferStatus.EXISTS_WITH_OTHER_CONTENT
    if one.resolves is not None:
        return _judge_resolution(one, known.booked.get(one.resolves), known.now)
    if one.corrects is not None:
        return _judge_reversal(one, known.booked.get(one.corrects))
    return TransferStatus.CREATED


def _judge_resolution(
    one: Transfer, named: _BookedTransfer | None, now: datetime
) -> TransferStatus:
    if named is None:
        return TransferStatus.NOT_FOUND
    held = named.transfer
    if held.phase != "pending":
        return TransferStatus.NOT_PENDING
    if named.is_resolved:
        return TransferStatus.ALREADY_RESOLVED
    if (one.debit, one.credit) != (held.debit, held.credit):
        return TransferStatus.OTHER_ACCOUNTS
    whole = one.amount_pico == held.amount_pico
    if not (whole or (one.phase == "post" and one.amount_pico < held.amount_pico)):
        return TransferStatus.OTHER_AMOUNT
    assert held.expires_at is not None
    if one.phase == "expire" and held.expires_at > now:
        return TransferStatus.NOT_EXPIRED
    return TransferStatus.CREATED


def _judge_reversal(one: Transfer, named: _BookedTransfer | None) -> TransferStatus:
    if named is None:
        return TransferStatus.NOT_FOUND
    original = named.transfer
    if original.phase not in ("posted", "post"):
        return TransferStatus.NOT_POSTED
    if named.is_corrected:
        return TransferStatus.ALREADY_CORRECTED
    if (one.debit, one.credit) != (original.credit, original.debit):
        return TransferStatus.OTHER_ACCOUNTS
    if one.amount_pico != original.amount_pico:
        return TransferStatus.OTHER_AMOUNT
    return TransferStatus.CREATED


def _taken(one: Transfer, known: _BookState) -> list[tuple[str, Pico]]:
    """Return the amounts that a transfer takes from grants' accounts, pending ones included."""
    moved = one.amount_pico if one.phase in ("posted", "post", "pending") else 0
    freed = known.booked[one.resolves].transfer.amount_pico if one.resolves is not None else 0
    credited = moved if one.phase in ("posted", "post") else 0
    sides = ((one.debit, moved - freed), (one.credit, -credited))
    return [(account, more) for account, more in sides if account.startswith(GRANT_PREFIX)]


_OPEN = sa.text("""
    WITH named AS (SELECT unnest(CAST(:accounts AS text[])) AS account),
    opened AS (
        INSERT INTO accounts (id) SELECT account FROM named ORDER BY account ON CONFLICT DO NOTHING
    )
    INSERT INTO balances (account, debits_pico, credits_pico)
    SELECT account, 0, 0 FROM named ORDER BY account ON CONFLICT DO NOTHING
""")
_LOCK = sa.text("""
    SELECT account FROM balances WHERE account = ANY(CAST(:accounts AS text[]))
    ORDER BY account FOR UPDATE
""")
_FIELDS = Transfer.__struct_fields__
_TYPES = {"amount_pico": "numeric[]", "expires_at": "timestamptz[]"}
_ARRAYS = [f"CAST(:{name} AS {_TYPES.get(name, 'text[]')})" for name in _FIELDS]
_BOOK = sa.text(f"""
    WITH wanted AS (
        SELECT * FROM unnest({", ".join(_ARRAYS)}) AS w({", ".join(_FIELDS)})
    ),
    booked AS (
        INSERT INTO transfers ({", ".join(_FIELDS)}, admitted_at)
        SELECT {", ".join(_FIELDS)}, now() FROM wanted ORDER BY id
        ON CONFLICT (id) DO NOTHING RETURNING *
    ),
    moves AS (
        SELECT b.debit, b.credit,
            CASE WHEN b.phase IN ('posted', 'post') THEN b.amount_pico ELSE 0 END AS moved,
            CASE b.phase WHEN 'pending' THEN b.amount_pico ELSE -coalesce(p.amount_pico, 0) END
                AS held
        FROM booked b LEFT JOIN transfers p ON p.id = b.resolves
    ),
    changes AS (
        SELECT account, sum(debits) AS debits, sum(credits) AS credits,
            sum(pending_debits) AS pending_debits, sum(pending_credits) AS pending_credits
        FROM (
            SELECT debit AS account, moved AS debits, 0 AS credits, held AS pending_debits,
                0 AS pending_credits FROM moves
            UNION ALL SELECT credit, 0, moved, 0, held FROM moves
        ) s GROUP BY account
    ),
    balanced AS (
        UPDATE balances b SET
            debits_pico = b.debits_pico + debits,
            credits_pico = b.credits_pico + credits,
            pending_debits_pico = b.pending_debits_pico + pending_debits,
            pending_credits_pico = b.pending_credits_pico + pending_credits
        FROM changes c WHERE c.account = b.account
    )
    SELECT count(*) FROM booked
""")


async def _book(conn: AsyncConnection, fresh: Sequence[Transfer]) -> int:
    """Insert transfers and move balances; return how many were inserted."""
    return int((await conn.execute(_BOOK, to_arrays(Transfer, fresh))).scalar_one())


async def _read(
    conn: AsyncConnection, wanted: Sequence[Transfer], accounts: Sequence[str]
) -> _BookState:
    named = {name for each in wanted for name in (each.id, each.resolves, each.corrects) if name}
    resolution, correction = transfers.alias(), transfers.alias()
    columns: list[sa.ColumnElement[Any]] = [
        *(transfers.c[name] for name in _FIELDS),
        sa.exists().where(resolution.c.resolves == transfers.c.id).label("is_resolved"),
        sa.exists().where(correction.c.corrects == transfers.c.id).label("is_corrected"),
    ]
    rows = await conn.execute(sa.select(*columns).where(transfers.c.id.in_(named)))
    booked = {
        row.id: read_struct(_BookedTransfer, row, transfer=read_struct(Transfer, row))
        for row in rows
    }
    own = balances.c
    left = own.credits_pico - own.debits_pico - own.pending_debits_pico
    grants = [account for account in accounts if account.startswith(GRANT_PREFIX)]
    found = await conn.execute(sa.select(own.account, left).where(own.account.in_(grants)))
    return _BookState(
        booked=booked,
        left_pico={account: int(amount) for account, amount in found},
        now=(await conn.execute(sa.select(sa.func.clock_timestamp()))).scalar_one(),
    )
