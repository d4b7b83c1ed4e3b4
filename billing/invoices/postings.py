"""Post the transfers of invoicing, between an org's receivable and an account of the house.

    rounding      house:rounding        the residuals of the lines, so that the receivable has
                                        whole coins of every invoice
    adjustment    house:adjustments     the terms of a whole period
    credit_note   house:credit_notes    the amount that a note takes back
    payment       house:cash            a payment that was received

The id of a transfer is that of its line, note or payment, and is posted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ledger.accounts import CASH, POST_LEGS, account_of
from billing.money import Pico

Kind = Literal["rounding", "adjustment", "credit_note", "payment"]
HOUSE: dict[Kind, str] = {
    "rounding": "house:rounding",
    "adjustment": "house:adjustments",
    "credit_note": "house:credit_notes",
    "payment": CASH,
}

_POST = sa.text(f"""
    WITH legs AS (
        SELECT id, CAST(NULL AS text) AS event_id, debit, credit, amount_pico, kind,
            CAST(NULL AS text) AS corrects, CAST(:moment AS timestamptz) AS admitted_at
        FROM unnest(CAST(:id AS text[]), CAST(:debit AS text[]), CAST(:credit AS text[]),
            CAST(:amount_pico AS numeric[]), CAST(:kind AS text[]))
            AS t(id, debit, credit, amount_pico, kind)
    ),
    {POST_LEGS}
    SELECT count(*) FROM legs
""")


class Posting(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    kind: Kind
    charged_pico: Pico
    """The change of the receivable; negative: the org owes less."""


async def post(
    conn: AsyncConnection, *, org_id: str, postings: Sequence[Posting], now: datetime
) -> None:
    """Post the postings that are not zero, in the caller's transaction.

    Raises: IntegrityError when one of the ids was posted before.
    """
    legs: dict[str, list[object]] = {
        name: [] for name in ("id", "debit", "credit", "amount_pico", "kind")
    }
    for each in postings:
        if not each.charged_pico:
            continue
        sides = [account_of(org_id), HOUSE[each.kind]]
        debit, credit = sides if each.charged_pico > 0 else reversed(sides)
        row = (each.id, debit, credit, abs(each.charged_pico), each.kind)
        for column, value in zip(legs.values(), row, strict=True):
            column.append(value)
    if legs["id"]:
        await conn.execute(_POST, {**legs, "moment": now})
