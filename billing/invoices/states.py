"""Invoice states, and which comes next. Pure: no time of its own, no table.

    draft -> finalized -> past_due -> reminder_1 -> reminder_2 -> reminder_3
                                                          -> suspended -> uncollectible
    from finalized on, whatever was reached: paid, when nothing is left to pay;
    voided, when credit notes took all of it back, be it after it was paid

Amounts are whole coins of the invoice's currency. Each stage of dunning is due so many days after
the one before, as it was really reached: who was not reminded because we were down is not hurried
for it.
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
"""Who has not paid such an invoice is served no longer (`suspension`)."""
DUNNING: tuple[tuple[State, int], ...] = (
    ("finalized", 0),
    ("past_due", 3),
    ("reminder_1", 7),
    ("reminder_2", 10),
    ("reminder_3", 10),
    ("suspended", 60),
)
"""How many days a stage lasts; of `finalized`, beyond the day it is due."""
STAGES: tuple[State, ...] = (*(state for state, _ in DUNNING), UNCOLLECTIBLE)
LASTS = {state: timedelta(days=days) for state, days in DUNNING}
OPEN = frozenset(STAGES)
"""Something is left to pay."""


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """The amounts of an invoice: what was asked for, and what became of it."""

    total: int
    credited: int = 0
    """By credit notes: never more than the total."""
    settled: int = 0
    """Paid, or taken from what was paid in advance; less what a credit note gave back."""

    @property
    def due(self) -> int:
        return self.total - self.credited - self.settled


class InvoiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    state: State
    since: datetime
    due_at: datetime
    """Of a draft: unknown, and not asked for."""


def settled_state(state: State, amounts: Amounts) -> State:
    """Return the state in which a change of its amounts leaves a finalized invoice."""
    assert state != DRAFT
    if amounts.total > 0 and amounts.credited == amounts.total:
        return VOIDED
    if amounts.due <= 0:
        return PAID
    assert state in OPEN, "what was settled is not opened again"
    return state


def next_stage(standing: InvoiceStatus) -> tuple[State, datetime] | None:
    """The next stage of dunning, and from when on; None: there is none."""
    if standing.state not in LASTS:
        return None
    begun = standing.due_at if standing.state == FINALIZED else standing.since
    following = STAGES[STAGES.index(standing.state) + 1]
    return following, begun + LASTS[standing.state]


def advance(standing: InvoiceStatus, now: datetime) -> State | None:
    """The stage that is reached by now; one at a time."""
    found = next_stage(standing)
    return found[0] if found is not None and found[1] <= now else None
