"""A prepaid org's wishes about its balance, and what becomes of the top-ups that it asks for.

Who administers the billing of an org says when it wants to be told and topped up; who takes
payments for the installation, an operator, grants a top-up or says that it failed. Both are
idempotent by its id: the credit of a top-up has an id made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.credits.balance_watch import (
    BalanceSettings,
    clear_top_up,
    hold_line,
    set_settings,
    settings_of,
)
from billing.credits.top_ups import GRANTABLE, TopUp, end_top_up, find_top_up, successor_of
from billing.money import format_usd
from gateway.audit.log import Actor, record_for_both
from gateway.db import tenant
from gateway.tenancy.errors import Conflict, InvalidField, NotFound
from gateway.tenancy.money.credits import add_credit, hold_org
from gateway.tenancy.money.spend_caps import check_amount

Check = Callable[[TopUp], None]
"""Raises what keeps the top-up, as it stands under its lock, from being changed."""
CheckWanted = Callable[[BalanceSettings], None]
"""The same of what is wanted."""


class TopUpEnded(Conflict):
    code = "top_up_ended"
    constant = "what became of it was said before"


class TopUpSuperseded(Conflict):
    code = "top_up_superseded"
    constant = "another one was asked for in its place: that one can be granted"


async def update_wanted(
    db: AsyncEngine,
    values: Mapping[str, Any],
    *,
    org_id: str,
    operator_org: str | None = None,
    actor: Actor,
    check: CheckWanted,
) -> BalanceSettings:
    """`values`: low_pico, top_up. What that crosses is said at once; an auto top-up that is
    switched off and on asks anew.

    Raises: InvalidField, NotFound (a live org), and what `check` raises.
    """
    async with tenant(db, org_id) as conn:
        await hold_org(conn, org_id)
        before = await settings_of(conn, org_id)
        check(before)
        after = msgspec.structs.replace(before, **values)
        if after == before:
            return before
        _check_wanted(after)
        await set_settings(conn, org_id, after)
        await record_for_both(
            conn,
            org_id=org_id,
            operator_org=operator_org,
            actor=actor,
            action="balance_settings.updated",
            target=org_id,
            before=_described(before),
            after=_described(after),
        )
        return after


async def get_top_up(conn: AsyncConnection, *, org_id: str, top_up_id: str) -> TopUp:
    """Raises: NotFound."""
    return await _find(conn, org_id, top_up_id, lock=False)


async def grant_top_up(
    db: AsyncEngine, top_up_id: str, *, org_id: str, operator_org: str, actor: Actor, check: Check
) -> TopUp:
    """Credit its amount. Idempotent; of one that has expired, too: who paid late has paid. But not
    of one in whose place another was asked for, or both might be paid.

    Raises: InvalidField, NotFound, TopUpEnded (it failed), TopUpSuperseded, and what `check`
    raises.
    """
    async with tenant(db, org_id) as conn:
        found = await _hold(conn, org_id, top_up_id, check)
        if found.state == "granted":
            return found
        if found.state not in GRANTABLE:
            raise TopUpEnded("top_up_id", f"it is {found.state}")
        if (other := await successor_of(conn, found)) is not None:
            raise TopUpSuperseded("top_up_id", f"{other!r} was asked for in its place")
        # It ends before its credit is watched, which may leave the balance below: then the next one
        # is asked for, where none is open.
        credit_id = credit_id_of(top_up_id)
        after = await end_top_up(conn, top_up_id, "granted", credit_id=credit_id)
        await clear_top_up(conn, org_id, top_up_id)
        await add_credit(
            conn,
            org_id=org_id,
            credit_id=credit_id,
            amount_pico=found.amount_pico,
            operator_org=operator_org,
            actor=actor,
        )
        return after


async def fail_top_up(
    db: AsyncEngine,
    top_up_id: str,
    reason: str,
    *,
    org_id: str,
    operator_org: str,
    actor: Actor,
    check: Check,
) -> TopUp:
    """Fail a top-up that nobody pays; the balance asks for no other one before it has been above
    its threshold, or its auto top-up was switched off. Idempotent.

    Raises: NotFound, TopUpEnded (it was granted), and what `check` raises.
    """
    async with tenant(db, org_id) as conn:
        found = await _hold(conn, org_id, top_up_id, check)
        if found.state == "failed":
            return found
        if found.state == "granted":
            raise TopUpEnded("top_up_id", "it is granted")
        after = await end_top_up(conn, top_up_id, "failed", failure=reason)
        await record_for_both(
            conn,
            org_id=org_id,
            operator_org=operator_org,
            actor=actor,
            action="top_up.failed",
            target=top_up_id,
            after={"organization": org_id, "failure": reason},
        )
        return after


def credit_id_of(top_up_id: str) -> str:
    return f"credit_{top_up_id.rpartition('_')[2]}"


async def _hold(conn: AsyncConnection, org_id: str, top_up_id: str, check: Check) -> TopUp:
    """Read and lock a top-up, so that nobody else answers it or asks for another one meanwhile."""
    await hold_org(conn, org_id)
    await hold_line(conn, org_id)
    found = await _find(conn, org_id, top_up_id, lock=True)
    check(found)
    return found


async def _find(conn: AsyncConnection, org_id: str, top_up_id: str, *, lock: bool) -> TopUp:
    found = await find_top_up(conn, org_id, top_up_id, lock=lock)
    if found is None:
        raise NotFound("top_up_id", f"no top-up {top_up_id!r}")
    return found


def _check_wanted(wanted: BalanceSettings) -> None:
    """Raises: InvalidField."""
    if wanted.low_pico is not None:
        check_amount("low_usd", wanted.low_pico)
    if (top_up := wanted.top_up) is None:
        return
    check_amount("auto_top_up.amount_usd", top_up.amount_pico)
    check_amount("auto_top_up.below_usd", top_up.below_pico)
    if top_up.amount_pico <= 0:
        raise InvalidField("auto_top_up.amount_usd", "must be more than nothing")


def _described(wanted: BalanceSettings) -> dict[str, Any]:
    """Describe the wishes for the audit log."""
    fields: dict[str, Any] = {
        "low_usd": None if wanted.low_pico is None else format_usd(wanted.low_pico),
        "auto_top_up": None,
    }
    if (top_up := wanted.top_up) is not None:
        fields["auto_top_up"] = {
            "amount_usd": format_usd(top_up.amount_pico),
            "below_usd": format_usd(top_up.below_pico),
            "max_per_day": top_up.max_per_day,
        }
    return fields
