"""/v1/admin/credits: what clients write and read. Money is a decimal text in USD, exact; moments
are Unix seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from billing.credits.grants import DEFAULT_PRIORITY, MAX_PRIORITY, MIN_PRIORITY
from billing.events import COMPONENTS, Component
from gateway.wire.admin.billing.spend_caps import AmountUsd, Id
from gateway.wire.admin.keys import Moment

Priority = Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)]
ModelName = Annotated[str, Meta(pattern=r"^[^\x00]{1,200}\Z")]
Models = Annotated[list[ModelName], Meta(min_length=1, max_length=100)]
Components = Annotated[list[Component], Meta(min_length=1, max_length=len(COMPONENTS))]


class NewCredit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The credit of the lowest `priority` pays first, among equals the one that expires first.
    `models`, `components`: it pays for nothing else."""

    org_id: Id
    amount_usd: AmountUsd
    priority: Priority = DEFAULT_PRIORITY
    expires_at: Moment | None = None
    models: Models | None = None
    components: Components | None = None


class CreditView(msgspec.Struct, frozen=True, kw_only=True):
    """A credit. `left_usd`: neither paid nor leased; `pending_usd`: leased to what runs now. A
    credit that has ended has nothing left."""

    object: str = "credit"
    id: str
    amount_usd: str
    left_usd: str
    pending_usd: str
    priority: int
    expires_at: int | None
    models: Sequence[str] | None
    components: Sequence[str] | None
    created_at: int
    revoked_at: int | None
    ended_at: int | None


class BalanceView(msgspec.Struct, frozen=True, kw_only=True):
    """The balance as far as the books have it: what runs is not in it yet. `prepaid`: no more is
    spent than was credited.

    `spent_usd`: what all usage cost, after refunds and re-ratings, as `/costs` has it; invoices may
    add terms of a whole period and roundings to it. `paid_by_credits_usd`: of what is owed, what
    credits have paid. `unpaid_usd`: what is owed by now, invoiced or not yet: usage and what
    invoices have added, less credit notes, credits and payments; less than nothing where more was
    paid than is owed. `unapplied_usd`: what credits have paid and what invoices have given back (a
    paid one that was voided), as far as no invoice was settled with it yet; the next one is.

    Of credits, `pending_usd` is leased to what runs, `available_usd` neither spent nor leased, and
    `left_usd` what remains of both when they have paid the usage that they are yet to pay.
    `credits`: those with something left, in the order in which they pay.
    """

    object: str = "balance"
    org_id: str
    prepaid: bool
    credited_usd: str
    spent_usd: str
    paid_by_credits_usd: str
    unpaid_usd: str
    unapplied_usd: str
    pending_usd: str
    available_usd: str
    left_usd: str
    credits: list[CreditView]
