"""Raise an alert when a prepaid balance runs low or out, and request a top-up, once a crossing.

A crossing is reported again only after a credit has lifted the balance above the threshold; what a
re-rating returns does not count, since it may lift it slightly and often. A top-up is requested
again whatever has lifted the balance, but never while one is open. The state of the notices
(`NoticeState`) is kept in the org's credit line, whose lock serializes the checks. Orgs that are
not prepaid get no notices.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.alerts.alerts import REFUSED, SPENT, raise_for_credit
from billing.credits.balance import balance_of
from billing.credits.top_ups import ask_for_top_up
from billing.money import PICO_PER_USD, Pico
from billing.queries import Query, ask
from billing.tables import AnyRow, balance_settings, credit_lines, read_struct

DREGS_PICO: Pico = PICO_PER_USD // 10
"""A balance below this is exhausted once a request was refused: a request reserves the most that it
may cost, so the last of a balance is seldom spent."""


class AutoTopUp(msgspec.Struct, frozen=True, kw_only=True):
    """Request `amount_pico` when `below_pico` or less is left."""

    amount_pico: Pico
    below_pico: Pico
    max_per_day: int
    """The most top-ups in any 24 hours."""


class BalanceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """An org's settings of its notices and automatic top-ups."""

    low_pico: Pico | None = None
    """A balance is low when this or less is left."""
    top_up: AutoTopUp | None = None


class NoticeState(msgspec.Struct, frozen=True, kw_only=True):
    """The crossings that were reported and still hold."""

    is_low: bool = False
    dry_at_pico: Pico | None = None
    """The balance when it was reported as exhausted."""
    top_up_id: str | None = None
    """The top-up that was requested since the balance fell below the threshold."""


class BalanceCrossing(msgspec.Struct, frozen=True, kw_only=True):
    """The notices that are due now, and the state after them."""

    after: NoticeState
    is_low: bool
    is_exhausted: bool
    wants_top_up: bool


def find_crossing(
    before: NoticeState,
    wanted: BalanceSettings,
    left_pico: Pico,
    *,
    was_refused: bool,
    rearms: bool,
) -> BalanceCrossing:
    """`was_refused`: the balance did not cover a request. `rearms`: thresholds below the balance
    may be reported again."""
    is_low = wanted.low_pico is not None and left_pico <= wanted.low_pico
    dry_at = before.dry_at_pico
    if rearms and dry_at is not None and left_pico > max(dry_at, 0):
        dry_at = None
    is_dry = left_pico <= 0 or (was_refused and left_pico < DREGS_PICO)
    is_below = wanted.top_up is not None and left_pico <= wanted.top_up.below_pico
    return BalanceCrossing(
        after=NoticeState(
            is_low=is_low or (before.is_low and not rearms),
            dry_at_pico=left_pico if is_dry and dry_at is None else dry_at,
            top_up_id=before.top_up_id if is_below else None,
        ),
        is_low=is_low and not before.is_low,
        is_exhausted=is_dry and dry_at is None,
        wants_top_up=is_below and before.top_up_id is None,
    )


HAS_EXPIRED = """EXISTS (
    SELECT FROM credit_grants g WHERE g.org_id = l.org_id AND g.ended_at IS NULL
        AND g.expires_at > l.watched_at AND g.expires_at <= now())
"""
"""SQL: true if a grant has expired since the line `l` was watched."""
_NOTICE_STATE = sa.text(f"""
    SELECT l.is_low, l.dry_at_pico, l.top_up_id, now() AS moment,
        coalesce((SELECT prepaid FROM orgs o WHERE o.id = l.org_id), true) AS is_prepaid,
        {HAS_EXPIRED} AS has_expired
    FROM credit_lines l WHERE l.org_id = :org_id FOR UPDATE OF l
""")


async def watch(
    conn: AsyncConnection, org_id: str, *, was_refused: bool = False, rearms: bool = False
) -> None:
    """Report the thresholds that the balance has crossed, at the end of the transaction that
    changed it. The caller has locked the line (`hold_line`) before rows of grants and accounts.
    `rearms`: a credit or a change of the settings was the cause."""
    row = (await conn.execute(_NOTICE_STATE, {"org_id": org_id})).one_or_none()
    if row is None:
        return
    before, after = read_struct(NoticeState, row), NoticeState()
    if row.is_prepaid:
        wanted, left = await settings_of(conn, org_id), (await balance_of(conn, org_id)).left_pico
        crossed = find_crossing(before, wanted, left, was_refused=was_refused, rearms=rearms)
        after = await _report(conn, org_id, crossed, wanted, left)
    if after != before or row.has_expired:
        changed = sa.update(credit_lines).where(credit_lines.c.org_id == org_id)
        values = msgspec.structs.asdict(after)
        await conn.execute(changed.values(**values, watched_at=row.moment))


async def _report(
    conn: AsyncConnection,
    org_id: str,
    crossed: BalanceCrossing,
    wanted: BalanceSettings,
    left_pico: Pico,
) -> NoticeState:
    if crossed.is_low:
        low = wanted.low_pico or 0
        await raise_for_credit(conn, org_id, "credits_low", low, left_pico, SPENT)
    if crossed.is_exhausted:
        reason = SPENT if left_pico <= 0 else REFUSED
        await raise_for_credit(conn, org_id, "credits_exhausted", 0, left_pico, reason)
    if not crossed.wants_top_up or wanted.top_up is None:
        return crossed.after
    top_up_id = await ask_for_top_up(
        conn,
        org_id,
        amount_pico=wanted.top_up.amount_pico,
        left_pico=left_pico,
        max_per_day=wanted.top_up.max_per_day,
    )
    return msgspec.structs.replace(crossed.after, top_up_id=top_up_id)


async def hold_line(conn: AsyncConnection, org_id: str) -> int | None:
    """Lock an org's credit line, before rows of its grants and accounts, so that transactions never
    deadlock. Return its version. None: the org was never given credit."""
    own = credit_lines.c
    found = sa.select(own.version).where(own.org_id == org_id).with_for_update()
    version: int | None = await conn.scalar(found)
    return version


async def clear_top_up(conn: AsyncConnection, org_id: str, top_up_id: str) -> None:
    """Let the balance request another top-up: this one is granted."""
    await hold_line(conn, org_id)
    own = credit_lines.c
    waiting = sa.update(credit_lines).where(own.org_id == org_id, own.top_up_id == top_up_id)
    await conn.execute(waiting.values(top_up_id=None))


# ---- settings


async def settings_of(conn: AsyncConnection, org_id: str) -> BalanceSettings:
    return await ask(conn, settings_query(org_id))


def settings_query(org_id: str) -> Query[BalanceSettings]:
    own = balance_settings.c
    found = sa.select(
        own.low_pico,
        own.top_up_pico.label("amount_pico"),
        own.top_up_below_pico.label("below_pico"),
        own.top_ups_per_day.label("max_per_day"),
    )
    return Query(found.where(own.org_id == org_id), _to_settings)


def _to_settings(rows: Sequence[AnyRow]) -> BalanceSettings:
    if not rows:
        return BalanceSettings()
    [row] = rows
    top_up = None if row.amount_pico is None else read_struct(AutoTopUp, row)
    return read_struct(BalanceSettings, row, top_up=top_up)


async def set_settings(conn: AsyncConnection, org_id: str, wanted: BalanceSettings) -> None:
    """Change the settings, and report the thresholds that this crosses, in the caller's
    transaction."""
    await hold_line(conn, org_id)
    top_up = wanted.top_up
    values = {
        "low_pico": wanted.low_pico,
        "top_up_pico": top_up and top_up.amount_pico,
        "top_up_below_pico": top_up and top_up.below_pico,
        "top_ups_per_day": top_up and top_up.max_per_day,
    }
    added = insert(balance_settings).values(org_id=org_id, **values)
    await conn.execute(added.on_conflict_do_update(index_elements=["org_id"], set_=values))
    await watch(conn, org_id, rearms=True)
