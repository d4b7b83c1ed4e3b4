"""Decides which share of a limit each cell has: by what its gateways were asked for. Pure.

Postgres holds one decision for each scope that is busy, and one under DEFAULT for all others. A
decision gives each cell a whole number of millionths, WHOLE in all. A gateway reads the decisions
every second and lets pass, of each limit, its cell's part, by buckets of its own Redis.

The bound. With r = limit / 60 per second and a burst B, any t seconds pass, over all cells, at most

    (B + r t) (1 + c / n) + m (B + D)

of n cells c are cut off from Postgres meanwhile, m: how much shares have moved, and D: how deep in
debt a bucket was (0 where requests reserve what they use; `limiter` says how deep it may become).
Limits smaller than a unit for each cell pass one more a cell.

1. The parts that are in force are never more than the limit. A gateway uses what it has read for
   FRESH_S after it *sent* the query. A decision that takes from a cell is in force there once it is
   read, at most FRESH_S after it was committed. What it gives is used DELAY_S, which is more, after
   it was *first read*, which is after it was committed. Meanwhile the lesser of both is used
   (`ShareInForce`), so while a decision spreads the sum is that of lesser parts. The next decision
   replaces this one (by its version: of two that are made at once one is lost) ROUND_S later, when
   nobody uses the one before. No two clocks are compared: FRESH_S and DELAY_S are durations of one
   process' monotonic clock, ROUND_S of Postgres' own.
2. In one cell a bucket lets pass its content and its refill (`limiter`). A bucket keeps its deficit
   as a time, so a cell whose share grows from a to b has at most (b - a) B more content at that
   moment, and one that shrinks may be forgiven that part of its debt: (a - b) D.
3. Shares move by at most 1 at once, and by 1 in MOVE_S beyond that: m <= 1 + t / MOVE_S. Beside
   that count, as 1, each cell that falls silent, whose share goes to the others at once, each that
   comes, which has its share at once, and each that is cut off and comes back.
4. A gateway that could not read for FRESH_S + DELAY_S uses an equal part, 1 / n. Where Postgres is
   away for everybody these are the limit again. A cell that is cut off while others go on has its
   share taken over: its 1 / n comes on top.

A cell is silent when Postgres has not heard of it for SILENT_S. So what a dead one had is used by
others after SILENT_S + ROUND_S + DELAY_S + 2 rounds of a second at the most: TAKEN_OVER_S.

Natural moves cost nothing of the m (B + D): who gives is idle, so its bucket is full, and who takes
is busy, so its bucket is empty.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

WHOLE = 1_000_000
"""The shares of one decision add up to it."""
DEFAULT = ""
"""The scope of the decision that holds where there is none."""
FRESH_S = 2.0
DELAY_S = 3.0
ROUND_S = 6.0
"""Between two decisions on a scope, by Postgres' clock."""
SILENT_S = 5.0
INTERVAL_S = 1.0
TAKEN_OVER_S = SILENT_S + ROUND_S + DELAY_S + 2 * INTERVAL_S
MOVE_S = 300.0
"""In so long shares of a scope may move by all of it, beyond what they may at once."""
DEADBAND = WHOLE // 20
"""Shares stay where none would move by more: a limit that changes costs the slices of it."""
LEAST = WHOLE // 20
"""A cell that lives keeps it, however little it is asked for; at most half of an equal share."""
MOST_ASKED = 2.0
"""Demand beyond that of a limit tells nothing: clients repeat what was refused."""

Shares = dict[str, int]
"""By cell, in millionths."""


class ShareDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of one scope. `before`: those that they replaced."""

    version: int
    shares: Shares
    before: Shares
    moves_left: int
    """How much may still move, in millionths, when it was made."""
    age_s: float
    """Since it was made, by Postgres' clock, when it was read."""


def decide(
    last: ShareDecision, asked: Mapping[str, float], *, deadband: int = DEADBAND
) -> ShareDecision | None:
    """Return the next decision, or None where the last one is to stay. `asked`: of each cell that
    lives, how much of the limit it was asked for of late; it has the cell that decides.
    `deadband`: no share moves for less."""
    if last.age_s < ROUND_S:
        return None
    wanted = wanted_shares(asked)
    moves_left = min(WHOLE, last.moves_left + int(last.age_s / MOVE_S * WHOLE))
    shares = dict(last.shares)
    freed = sum(shares.pop(cell) for cell in last.shares if cell not in asked)
    if freed:
        lacking = {cell: max(0, wanted[cell] - shares.get(cell, 0)) for cell in asked}
        for cell, more in divided(freed, lacking).items():
            shares[cell] = shares.get(cell, 0) + more
    moving = {cell: wanted[cell] - shares.get(cell, 0) for cell in asked}
    if max(map(abs, moving.values())) > deadband or any(cell not in shares for cell in asked):
        total = sum(more for more in moving.values() if more > 0)
        joining = sum(wanted[cell] for cell in asked if cell not in last.shares)
        most = min(total, max(joining, moves_left - freed))
        given = divided(most, {cell: max(0, more) for cell, more in moving.items()})
        taken = divided(most, {cell: max(0, -more) for cell, more in moving.items()})
        shares = {cell: shares.get(cell, 0) + given[cell] - taken[cell] for cell in asked}
        freed += most
    if shares == last.shares:
        return None
    return ShareDecision(
        version=last.version + 1,
        shares=shares,
        before=last.shares,
        moves_left=max(-WHOLE, moves_left - freed),
        age_s=0.0,
    )


def wanted_shares(asked: Mapping[str, float]) -> Shares:
    """Return what each cell should have: what it is asked for and an equal part of the rest; where
    all ask for more than there is, nobody gets more than who asks for more."""
    left, shares = 1.0, dict[str, float]()
    least = min(LEAST / WHOLE, 0.5 / len(asked))
    wants = {cell: min(MOST_ASKED, max(least, found)) for cell, found in asked.items()}
    for place, cell in enumerate(sorted(wants, key=lambda each: (wants[each], each))):
        shares[cell] = min(wants[cell], left / (len(wants) - place))
        left -= shares[cell]
    rest = left / len(wants)
    return divided(WHOLE, {cell: round((got + rest) * WHOLE) for cell, got in shares.items()})


def equal_shares(cells: Mapping[str, object]) -> Shares:
    return divided(WHOLE, dict.fromkeys(cells, 1))


def divided(amount: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Divide an amount by weights, to the unit: what rounding leaves goes to the largest
    remainders. All get nothing where all weights are 0, or the amount is."""
    total = sum(weights.values())
    if not total:
        return dict.fromkeys(weights, 0)
    parts = {name: amount * weight // total for name, weight in weights.items()}
    left = amount - sum(parts.values())
    if left:
        by_rest = sorted(weights, key=lambda name: (-(amount * weights[name] % total), name))
        for name in by_rest[:left]:
            parts[name] += 1
    return parts


class ShareInForce:
    """The shares of one scope as one gateway may use them: those of a decision, and for DELAY_S
    after it was first read no more than those before it. `seen_at`: its monotonic clock."""

    def __init__(self, decision: ShareDecision, seen_at: float) -> None:
        self.decision, self.seen_at = decision, seen_at

    def part(self, amount: int, cell: str, now: float) -> int:
        """Return the part of an amount that a cell has."""
        mine = divided(amount, self.decision.shares).get(cell, 0)
        if now < self.seen_at + DELAY_S:
            mine = min(mine, divided(amount, self.decision.before).get(cell, 0))
        return mine
