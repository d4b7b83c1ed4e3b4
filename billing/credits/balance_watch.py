"""Watch a prepaid balance that runs low, or out: it is told once a crossing, and a top-up is asked
for once.

Knows no webhook.

What is left falls by what is booked, taken back and expired, and rises by a credit, or by what a
re-rating returns. It is told of again once a credit has lifted the balance above a threshold: what
is returned may do so by a hair, and again and again. A top-up may follow whatever has lifted it,
but none while one is open. What was told stands beside the org's line (`NoticeState`), which
whoever looks holds: of two at once the second sees what the first has told. An org
that is not prepaid is told nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.alerts.alerts import REFUSED, SPENT, raise_for_credit
from billing.credits.balance import balance_of
from billing.credits.top_ups import ask_for_top_up
from billing.money import PICO_PER_USD, Pico
from billing.tables import balance_settings, credit_lines

DREGS_PICO: Pico = PICO_PER_USD // 10
"""Who was refused with less than this left has nothing left: a request holds the most that it may
cost, so the last of a balance is seldom spent."""


class AutoTopUp(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for `amount_pico` whenever no more than `below_pico` is left."""

    amount_pico: Pico
    below_pico: Pico
    max_per_day: int
    """In any 24 hours."""


class BalanceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """An org's settings of its balance: when to be told, and when to top up."""

    low_pico: Pico | None = None
    """To be told when no more is left."""
    top_up: AutoTopUp | None = None


class NoticeState(msgspec.Struct, frozen=True, kw_only=True):
    """The crossings that an org was told of and that still hold."""

    is_low: bool = False
    dry_at_pico: Pico | None = None
    """What was left when it was said to be exhausted."""
    top_up_id: str | None = None
    """Asked for, and the balance has not been above since."""


class BalanceCrossing(msgspec.Struct, frozen=True, kw_only=True):
    """The notices that are due now, and the state after they are told."""

    told: NoticeState
    is_low: bool
    is_exhausted: bool
    wants_top_up: bool


def find_crossing(
    told: NoticeState, wanted: BalanceSettings, left_pico: Pico, *, was_refused: bool, rearms: bool
) -> BalanceCrossing:
    """`was_refused`: a request waited for more than there is. `rearms`: what lies below by now may
    be told of again, should it be crossed again."""
    is_low = wanted.low_pico is not None and left_pico <= wanted.low_pico
    dry_at = told.dry_at_pico
    if rearms and dry_at is not None and left_pico > max(dry_at, 0):
        dry_at = None
    is_dry = left_pico <= 0 or (was_refused and left_pico < DREGS_PICO)
    is_below = wanted.top_up is not None and left_pico <= wanted.top_up.below_pico
    return BalanceCrossing(
        told=NoticeState(
            is_low=is_low or (told.is_low and not rearms),
            dry_at_pico=left_pico if is_dry and dry_at is None else dry_at,
            top_up_id=told.top_up_id if is_below else None,
        ),
        is_low=is_low and not told.is_low,
        is_exhausted=is_dry and dry_at is None,
        wants_top_up=is_below and told.top_up_id is None,
    )


HAS_EXPIRED = """EXISTS (
    SELECT FROM credit_grants g WHERE g.org_id = l.org_id AND g.ended_at IS NULL
        AND g.expires_at > l.watched_at AND g.expires_at <= now())
"""
"""SQL: that a grant has since somebody looked at its line `l`."""
_STANDING = sa.text(f"""
    SELECT l.is_low, l.dry_at_pico, l.top_up_id, now() AS moment,
        coalesce((SELECT prepaid FROM orgs o WHERE o.id = l.org_id), true) AS is_prepaid,
        {HAS_EXPIRED} AS has_expired
    FROM credit_lines l WHERE l.org_id = :org_id FOR UPDATE OF l
""")


async def watch(
    conn: AsyncConnection, org_id: str, *, was_refused: bool = False, rearms: bool = False
) -> None:
    """Say what the balance has crossed, in the caller's transaction, once it has changed what is
    left. Whoever changes rows of a grant or an account holds the line before (`hold_line`).
    `rearms`: it was by a credit, or by what is wanted."""
    row = (await conn.execute(_STANDING, {"org_id": org_id})).one_or_none()
    if row is None:
        return
    told = NoticeState(
        is_low=row.is_low,
        dry_at_pico=None if row.dry_at_pico is None else int(row.dry_at_pico),
        top_up_id=row.top_up_id,
    )
    after = NoticeState()
    if row.is_prepaid:
        wanted, left = await settings_of(conn, org_id), (await balance_of(conn, org_id)).left_pico
        crossed = find_crossing(told, wanted, left, was_refused=was_refused, rearms=rearms)
        after = await _say(conn, org_id, crossed, wanted, left)
    if after != told or row.has_expired:
        changed = sa.update(credit_lines).where(credit_lines.c.org_id == org_id)
        values = msgspec.structs.asdict(after)
        await conn.execute(changed.values(**values, watched_at=row.moment))


async def _say(
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
        return crossed.told
    top_up_id = await ask_for_top_up(
        conn,
        org_id,
        amount_pico=wanted.top_up.amount_pico,
        left_pico=left_pico,
        max_per_day=wanted.top_up.max_per_day,
    )
    return msgspec.structs.replace(crossed.told, top_up_id=top_up_id)


async def hold_line(conn: AsyncConnection, org_id: str) -> None:
    """Nobody else tops up, settles or watches the org before this commits: held before rows of its
    grants and accounts, so that nobody waits in a circle."""
    own = credit_lines.c
    await conn.execute(sa.select(own.org_id).where(own.org_id == org_id).with_for_update())


async def clear_top_up(conn: AsyncConnection, org_id: str, top_up_id: str) -> None:
    """The balance may ask for another one: the one that it waits for is granted. The line is held
    before, or who looks meanwhile would wait for it unseen."""
    await hold_line(conn, org_id)
    own = credit_lines.c
    waiting = sa.update(credit_lines).where(own.org_id == org_id, own.top_up_id == top_up_id)
    await conn.execute(waiting.values(top_up_id=None))


# ---- what an org wants


async def settings_of(conn: AsyncConnection, org_id: str) -> BalanceSettings:
    found = sa.select(balance_settings).where(balance_settings.c.org_id == org_id)
    row = (await conn.execute(found)).one_or_none()
    return BalanceSettings() if row is None else _to_wanted(row)


async def set_settings(conn: AsyncConnection, org_id: str, wanted: BalanceSettings) -> None:
    """From now on; what that crosses is said at once. In the caller's transaction."""
    await hold_line(conn, org_id)
    row = {"org_id": org_id, "low_pico": wanted.low_pico, **_top_up_columns(wanted.top_up)}
    changed = {name: value for name, value in row.items() if name != "org_id"}
    added = insert(balance_settings).values(row)
    await conn.execute(added.on_conflict_do_update(index_elements=["org_id"], set_=changed))
    await watch(conn, org_id, rearms=True)


def _to_wanted(row: sa.Row[Any]) -> BalanceSettings:
    top_up = None
    if row.top_up_pico is not None:
        top_up = AutoTopUp(
            amount_pico=int(row.top_up_pico),
            below_pico=int(row.top_up_below_pico),
            max_per_day=row.top_ups_per_day,
        )
    low = row.low_pico
    return BalanceSettings(low_pico=None if low is None else int(low), top_up=top_up)


def _top_up_columns(top_up: AutoTopUp | None) -> dict[str, int | None]:
    names = ("top_up_pico", "top_up_below_pico", "top_ups_per_day")
    if top_up is None:
        return dict.fromkeys(names)
    values = (top_up.amount_pico, top_up.below_pico, top_up.max_per_day)
    return dict(zip(names, values, strict=True))
