"""Billing accounts say how an org is billed: in which currency, by which clock, from which day on,
with what patience. And exchange rates say what a foreign coin was worth when.

An account is kept with its history: a change is a new version, which holds for every period that
begins to be invoiced after it; a period that was drafted keeps the version that it was drafted by.
"""

from __future__ import annotations

from collections.abc import Sequence
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

MAX_NET_DAYS = 365
MAX_GRACE_HOURS = 720
ACCOUNT_LOCK = 0x696E766F6963
PLAUSIBLE_UNIT_PICO = (PICO_PER_USD // 10**7, 10 * PICO_PER_USD)
"""What a unit of any currency is worth, unless somebody says that it is meant."""
MAX_JUMP = 2
"""A rate so many times the one before, or so small a part of it, is a slip more often than not."""


class BillingTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of an account that an admin sets."""

    currency: str = USD
    timezone: str = "UTC"
    billing_day: int = 1
    """On which a period begins; in a month that has fewer days, its last."""
    net_days: int = 30
    grace_hours: int = 24
    """How long after its end a period waits for events that come late."""
    issuer: str = "TG"
    """Who sends the invoice: its numbers begin with it, and have no gaps."""


class BillingAccount(msgspec.Struct, frozen=True, kw_only=True):
    org_id: str
    version: int
    terms: BillingTerms
    created_at: datetime


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    currency: str
    valid_from: datetime
    coin_pico: Pico
    """What its smallest coin is worth."""
    source: str


def check_currency(currency: str) -> int:
    """How many places it has. Raises: BadInvoicing."""
    try:
        return exponent_of(currency)
    except MoneyError:
        raise BadInvoicing("currency", "must be one of ISO 4217, with a smallest coin") from None


def check_terms(terms: BillingTerms) -> BillingTerms:
    """Raises: BadInvoicing, naming the field."""
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
    """A new version, unless it says what holds already. In the caller's transaction.

    Raises: BadInvoicing.
    """
    check_terms(terms)
    # Two at once are one behind the other.
    key = sa.func.hashtextextended(org_id, ACCOUNT_LOCK)
    await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))
    standing = await account_of(conn, org_id)
    if standing is not None and standing.terms == terms:
        return standing
    version = 1 if standing is None else standing.version + 1
    created_at = now or datetime.now(UTC)
    fields = msgspec.structs.asdict(terms)
    row = {"org_id": org_id, "version": version, "created_at": created_at, **fields}
    await conn.execute(insert(billing_accounts), row)
    return BillingAccount(org_id=org_id, version=version, terms=terms, created_at=created_at)


def to_account(row: sa.Row[Any]) -> BillingAccount:
    fields = {name: getattr(row, name) for name in BillingTerms.__struct_fields__}
    return BillingAccount(
        org_id=row.org_id,
        version=row.version,
        terms=BillingTerms(**fields),
        created_at=row.created_at.astimezone(UTC),
    )


def accounts_of(org_id: str) -> sa.Select[Any]:
    """All versions."""
    return sa.select(billing_accounts).where(billing_accounts.c.org_id == org_id)


async def account_of(
    conn: AsyncConnection, org_id: str, *, version: int | None = None
) -> BillingAccount | None:
    """The one that holds now, or a certain one."""
    found = accounts_of(org_id)
    if version is not None:
        found = found.where(billing_accounts.c.version == version)
    newest = found.order_by(billing_accounts.c.version.desc()).limit(1)
    row = (await conn.execute(newest)).one_or_none()
    return None if row is None else to_account(row)


async def orgs_with_account(conn: AsyncConnection) -> Sequence[str]:
    found = sa.select(billing_accounts.c.org_id).distinct().order_by(billing_accounts.c.org_id)
    return (await conn.execute(found)).scalars().all()


async def add_rate(
    conn: AsyncConnection,
    *,
    currency: str,
    usd_per_unit: str,
    valid_from: datetime,
    source: str,
    is_confirmed: bool = False,
) -> Rate:
    """Add what a unit of `currency` is worth from then on, until a later rate. In the caller's
    transaction. A rate that looks like a slip must be confirmed: it is never taken back.

    Raises: BadInvoicing; InvoicingConflict where another one stands from that moment.
    """
    if currency == USD:
        raise BadInvoicing("currency", "a USD is worth a USD")
    exponent = check_currency(currency)
    try:
        coin = coin_of(currency, usd_per_unit)
    except MoneyError:
        most = "must be more than nothing, and for its smallest coin a whole number of pico-USD"
        raise BadInvoicing("usd_per_unit", most) from None
    if not is_confirmed:
        check_plausible(coin, exponent, await rate_at(conn, currency, valid_from))
    row = {
        "currency": currency,
        "valid_from": valid_from,
        "coin_pico": coin,
        "source": source,
    }
    added = await conn.execute(insert(fx_rates).values(row).on_conflict_do_nothing())
    if not added.rowcount:
        raise InvoicingConflict("valid_from", f"{currency} has a rate from that moment already")
    return Rate(currency=currency, valid_from=valid_from, coin_pico=coin, source=source)


def check_plausible(coin: Pico, exponent: int, before: Rate | None) -> None:
    """`before`: which the new one follows. Raises: BadInvoicing."""
    if before is None:
        least, most = PLAUSIBLE_UNIT_PICO
        is_plausible = least <= coin * 10**exponent <= most
    else:
        is_plausible = before.coin_pico <= coin * MAX_JUMP <= before.coin_pico * MAX_JUMP**2
    if not is_plausible:
        of = "that of any currency" if before is None else "the rate before it"
        raise BadInvoicing("usd_per_unit", f"is far from {of}: `confirm` it if it is meant")


def rates_at(moment: datetime) -> sa.Select[Any]:
    """For a page: of each currency the rate that is in force, with an `id`."""
    own = fx_rates.c
    second = sa.cast(sa.func.floor(sa.extract("epoch", own.valid_from)), sa.BigInteger)
    named = (own.currency + "." + sa.cast(second, sa.Text)).label("id")
    newest = sa.select(named, fx_rates).ext(distinct_on(own.currency))
    newest = newest.where(own.valid_from <= moment).order_by(own.currency, own.valid_from.desc())
    return sa.select(newest.subquery("newest"))


def to_rate(row: sa.Row[Any]) -> Rate:
    return Rate(
        currency=row.currency,
        valid_from=row.valid_from.astimezone(UTC),
        coin_pico=int(row.coin_pico),
        source=row.source,
    )


async def rate_at(conn: AsyncConnection, currency: str, moment: datetime) -> Rate | None:
    """The newest that was valid by then; None: there is none. A cent is a cent at all times."""
    if currency == USD:
        beginning = datetime(1970, 1, 1, tzinfo=UTC)
        return Rate(currency=USD, valid_from=beginning, coin_pico=usd_coin(), source="")
    own = fx_rates.c
    found = sa.select(fx_rates).where(own.currency == currency, own.valid_from <= moment)
    row = (await conn.execute(found.order_by(own.valid_from.desc()).limit(1))).one_or_none()
    return None if row is None else to_rate(row)
