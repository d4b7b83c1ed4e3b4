"""The states of an invoice and the transitions between them. Pure.

    draft -> finalized -> past_due -> reminder_1 -> reminder_2 -> reminder_3
                                                          -> suspended -> uncollectible
    finalized or later -> paid      nothing is left to pay
                       -> voided    credit notes have taken all of it back, before or after payment

Amounts are whole coins of the invoice's currency. A stage of dunning is due so many days after the
stage before was really entered, so a customer gets the same time if we were down.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

import msgspec

State = Literal[
    "draft",
    "finalized",
    "past_due",
    "reminder_1",
    "reminder_2",
    "reminder_3",
    "suspended",
    "uncollectible",
    "paid",
    "voided",
]
DRAFT: State = "draft"
FINALIZED: State = "finalized"
PAID: State = "paid"
VOIDED: State = "voided"
SUSPENDED: State = "suspended"
UNCOLLECTIBLE: State = "uncollectible"
SUSPENDING: tuple[State, ...] = (SUSPENDED, UNCOLLECTIBLE)
"""An org with an invoice in one of these states is suspended (`suspension`)."""
DUNNING: tuple[tuple[State, int], ...] = (
    ("finalized", 0),
    ("past_due", 3),
    ("reminder_1", 7),
    ("reminder_2", 10),
    ("reminder_3", 10),
    ("suspended", 60),
)
"""The days that each stage lasts; `finalized` lasts until the invoice is due."""
STAGES: tuple[State, ...] = (*(state for state, _ in DUNNING), UNCOLLECTIBLE)
LASTS = {state: timedelta(days=days) for state, days in DUNNING}
OPEN = frozenset(STAGES)
"""The states in which something is left to pay."""


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """The amounts of an invoice in coins."""

    total: int
    credited: int = 0
    """The sum of its credit notes, at most the total."""
    settled: int = 0
    """The sum of its payments."""

    @property
    def due(self) -> int:
        return self.total - self.credited - self.settled


class InvoiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    state: State
    since: datetime
    due_at: datetime
    """Not used for a draft."""


def settled_state(state: State, amounts: Amounts) -> State:
    """Return the state of a final invoice after a change of its amounts."""
    assert state != DRAFT
    if amounts.total > 0 and amounts.credited == amounts.total:
        return VOIDED
    if amounts.due <= 0:
        return PAID
    assert state in OPEN, "a settled invoice stays settled"
    return state


def next_stage(status: InvoiceStatus) -> tuple[State, datetime] | None:
    """Return the next stage of dunning and when it is due. None: there is none."""
    if status.state not in LASTS:
        return None
    begun = status.due_at if status.state == FINALIZED else status.since
    following = STAGES[STAGES.index(status.state) + 1]
    return following, begun + LASTS[status.state]


def advance(status: InvoiceStatus, now: datetime) -> State | None:
    """Return the next stage of dunning if it is due."""
    found = next_stage(status)
    return found[0] if found is not None and found[1] <= now else None
