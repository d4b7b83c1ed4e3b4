"""Billing accounts, which hold the terms by which an org is invoiced, and exchange rates.

A change of an account is a new version. It applies to periods that are drafted later; a draft keeps
the version that it was made by.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import distinct_on, insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.calendar import timezones
from billing.currency import USD, coin_of, exponent_of, usd_coin
from billing.errors import BadInvoicing, InvoicingConflict, MoneyError
from billing.invoices.tables import billing_accounts, fx_rates
from billing.money import PICO_PER_USD, Pico
from billing.tables import EPOCH, read_struct

MAX_NET_DAYS = 365
MAX_GRACE_HOURS = 720
ACCOUNT_LOCK = 0x696E766F6963
PLAUSIBLE_UNIT_PICO = (PICO_PER_USD // 10**7, 10 * PICO_PER_USD)
"""A rate outside of these bounds has to be confirmed."""
MAX_JUMP = 2
"""A rate has to be confirmed if it differs from the one before by more than this factor."""


class BillingTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of an account that an admin sets."""

    currency: str = USD
    timezone: str = "UTC"
    billing_day: int = 1
    """The day on which a period begins; a shorter month has it on its last day."""
    net_days: int = 30
    grace_hours: int = 24
    """A period waits so long after its end for late events."""
    issuer: str = "TG"
    """The sender of the invoice, with which its numbers begin."""


class BillingAccount(msgspec.Struct, frozen=True, kw_only=True):
    org_id: str
    version: int
    terms: BillingTerms
    created_at: datetime


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    currency: str
    valid_from: datetime
    coin_pico: Pico
    """The value of its smallest coin."""
    source: str


def check_currency(currency: str) -> int:
    """Return the number of decimal places of a currency. Raises: BadInvoicing."""
    try:
        return exponent_of(currency)
    except MoneyError:
        raise BadInvoicing("currency", "must be one of ISO 4217, with a smallest coin") from None


def check_terms(terms: BillingTerms) -> BillingTerms:
    """Check the bounds of all terms. Raises: BadInvoicing, naming the field."""
    check_currency(terms.currency)
    if terms.timezone not in timezones():
        raise BadInvoicing("timezone", "must be a timezone of the IANA database")
    bounds = {
        "billing_day": (1, 31),
        "net_days": (0, MAX_NET_DAYS),
        "grace_hours": (0, MAX_GRACE_HOURS),
    }
    for field, (least, most) in bounds.items():
        if not least <= getattr(terms, field) <= most:
            raise BadInvoicing(field, f"must be from {least} to {most}")
    return terms


async def set_account(
    conn: AsyncConnection, *, org_id: str, terms: BillingTerms, now: datetime | None = None
) -> BillingAccount:
    """Add a version with these terms, unless they are current, in the caller's transaction.

    Raises: BadInvoicing.
    """
    check_terms(terms)
    # The lock gives concurrent changes different versions.
    key = sa.func.hashtextextended(org_id, ACCOUNT_LOCK)
    await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))
    current = await account_of(conn, org_id)
    if current is not None and current.terms == terms:
        return current
    version = 1 if current is None else current.version + 1
    created_at = now or datetime.now(UTC)
    fields = msgspec.structs.asdict(terms)
    row = {"org_id": org_id, "version": version, "created_at": created_at, **fields}
    await conn.execute(insert(billing_accounts), row)
    return BillingAccount(org_id=org_id, version=version, terms=terms, created_at=created_at)


async def account_of(
    conn: AsyncConnection, org_id: str, *, version: int | None = None
) -> BillingAccount | None:
    """Return a version of an org's account. None: the newest."""
    own = billing_accounts.c
    found = sa.select(billing_accounts).where(own.org_id == org_id)
    if version is not None:
        found = found.where(own.version == version)
    row = (await conn.execute(found.order_by(own.version.desc()).limit(1))).one_or_none()
    if row is None:
        return None
    return read_struct(BillingAccount, row, terms=read_struct(BillingTerms, row))


async def add_rate(
    conn: AsyncConnection,
    *,
    currency: str,
    usd_per_unit: str,
    valid_from: datetime,
    source: str,
    is_confirmed: bool = False,
) -> Rate:
    """Add an exchange rate that is valid from then on until a later one, in the caller's
    transaction. It is never removed, so one that looks like a mistake has to be confirmed.

    Raises: BadInvoicing; InvoicingConflict when the currency has a rate from that moment.
    """
    if currency == USD:
        raise BadInvoicing("currency", "USD has no exchange rate")
    exponent = check_currency(currency)
    try:
        coin = coin_of(currency, usd_per_unit)
    except MoneyError:
        most = "must be positive, and a whole number of pico-USD for the smallest coin"
        raise BadInvoicing("usd_per_unit", most) from None
    if not is_confirmed:
        check_plausible(coin, exponent, await rate_at(conn, currency, valid_from))
    rate = Rate(currency=currency, valid_from=valid_from, coin_pico=coin, source=source)
    row = insert(fx_rates).values(msgspec.structs.asdict(rate))
    if not (await conn.execute(row.on_conflict_do_nothing())).rowcount:
        raise InvoicingConflict("valid_from", f"{currency} has a rate from that moment already")
    return rate


def check_plausible(coin: Pico, exponent: int, before: Rate | None) -> None:
    """Compare a rate with the one `before` it, or with fixed bounds. Raises: BadInvoicing."""
    if before is None:
        least, most = PLAUSIBLE_UNIT_PICO
        is_plausible = least <= coin * 10**exponent <= most
    else:
        is_plausible = before.coin_pico <= coin * MAX_JUMP <= before.coin_pico * MAX_JUMP**2
    if not is_plausible:
        expected = "that of any currency" if before is None else "the rate before it"
        raise BadInvoicing("usd_per_unit", f"is far from {expected}: `confirm` it if it is right")


def rates_at(moment: datetime) -> sa.Select[Any]:
    """Return the query of each currency's rate at a moment, with an `id`, for `to_rate`."""
    own = fx_rates.c
    second = sa.cast(sa.func.floor(sa.extract("epoch", own.valid_from)), sa.BigInteger)
    named = (own.currency + "." + sa.cast(second, sa.Text)).label("id")
    newest = sa.select(named, fx_rates).ext(distinct_on(own.currency))
    newest = newest.where(own.valid_from <= moment).order_by(own.currency, own.valid_from.desc())
    return sa.select(newest.subquery("newest"))


def to_rate(row: sa.Row[Any]) -> Rate:
    return read_struct(Rate, row)


async def rate_at(conn: AsyncConnection, currency: str, moment: datetime) -> Rate | None:
    """Return the rate of a currency at a moment. None: it has none yet."""
    if currency == USD:
        return Rate(currency=USD, valid_from=EPOCH, coin_pico=usd_coin(), source="")
    own = fx_rates.c
    found = sa.select(fx_rates).where(own.currency == currency, own.valid_from <= moment)
    row = (await conn.execute(found.order_by(own.valid_from.desc()).limit(1))).one_or_none()
    return None if row is None else to_rate(row)
