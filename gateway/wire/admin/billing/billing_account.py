"""/v1/admin/billing-account, fx-rates, payments and credit notes: what clients write and read.

Amounts are decimal texts in the invoice's currency; moments are Unix seconds.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from billing.invoices.accounts import BillingAccount
from billing.invoices.accounts import Rate as KnownRate
from gateway.wire.shared.resource import view_of

Amount = Annotated[str, Meta(pattern=r"^[0-9]{1,15}(\.[0-9]{1,4})?\Z")]
Rate = Annotated[str, Meta(pattern=r"^[0-9]{1,9}(\.[0-9]{1,12})?\Z")]
Currency = Annotated[str, Meta(pattern=r"^[A-Z]{3}\Z")]
Issuer = Annotated[str, Meta(pattern=r"^[A-Z0-9]{1,16}\Z")]
Timezone = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_+/-]{1,64}\Z")]
Said = Annotated[str, Meta(pattern=r"^[\x20-\x7e]{1,200}\Z")]
LineId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,100}\Z")]
Moment = Annotated[int, Meta(ge=0, le=4_102_444_800)]
"""Unix seconds until the year 2100."""


class NewTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The terms of an account. `issuer`: who sends the invoices; their numbers begin with it."""

    currency: Currency = "USD"
    timezone: Timezone = "UTC"
    billing_day: Annotated[int, Meta(ge=1, le=31)] = 1
    net_days: Annotated[int, Meta(ge=0, le=365)] = 30
    grace_hours: Annotated[int, Meta(ge=0, le=720)] = 24
    issuer: Issuer = "TG"


class AccountView(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "billing_account"
    org_id: str
    version: int
    currency: str
    timezone: str
    billing_day: int
    net_days: int
    grace_hours: int
    issuer: str
    created_at: int


class NewRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new exchange rate. `confirm`: take it though it is far from the rate before it, or from any
    currency's."""

    currency: Currency
    usd_per_unit: Rate
    valid_from: Moment
    source: Said
    confirm: bool = False


class RateView(msgspec.Struct, frozen=True, kw_only=True):
    """An exchange rate. `coin_usd`: what the currency's smallest coin is worth."""

    object: str = "fx_rate"
    id: str
    currency: str
    coin_usd: str
    valid_from: int
    source: str


class NewPayment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    amount: Amount
    reference: Said


class NewCreditNote(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new credit note. `lines`: how much of which; null: all that is left of the invoice, which
    voids it."""

    reason: Said
    lines: Annotated[dict[LineId, Amount], Meta(min_length=1, max_length=1000)] | None = None


def to_account_view(account: BillingAccount) -> AccountView:
    return view_of(AccountView, account, **msgspec.structs.asdict(account.terms))


def to_rate_view(rate: KnownRate) -> RateView:
    return view_of(RateView, rate, id=f"{rate.currency}.{int(rate.valid_from.timestamp())}")
