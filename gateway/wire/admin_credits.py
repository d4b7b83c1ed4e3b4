"""/v1/admin/credits: what clients write and read. Above: `routes.admin_credits`. Below: msgspec.
Money is a decimal text in USD, exact; moments are Unix seconds.
"""

from __future__ import annotations

import msgspec

from gateway.wire.admin_spend_caps import AmountUsd, Id


class NewCredit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    org_id: Id
    amount_usd: AmountUsd


class CreditView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "credit"
    id: str
    amount_usd: str
    created_at: int


class BalanceView(msgspec.Struct, frozen=True, kw_only=True):
    """As far as the books have it: what runs is not in it yet. `prepaid`: no more is spent than was
    credited."""

    object: str = "balance"
    org_id: str
    prepaid: bool
    credited_usd: str
    spent_usd: str
    left_usd: str
