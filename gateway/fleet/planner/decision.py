"""Decides how many replicas of a model are wanted now, and says why.

Pure: what was seen, the bounds and what was needed lately go in, a decision comes out. Each reason
has a need of its own and the largest counts. More are wanted at once; fewer once nothing needed
more for the whole of a cool-down, so that of two changes in opposite directions the second waits
for it: a load that goes up and down moves nothing. The last replica goes only where none need be
there, nothing is asked for `idle_s`, and nothing runs.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from gateway.fleet.planner.sizing import (
    PoolLoad,
    PromptTransfer,
    late_share,
    replicas_needed,
    roles_needed,
)
from gateway.lanes import Slo

CLEAR_S = 20.0
"""Work that waits is to be done within so long, beside what comes."""
MOST_KV_USED = 0.85
"""Beyond it requests wait for blocks."""
PLANNED_LATE = 0.75
"""The part of what an objective lets be late that is planned with. The rest is for what no plan
foresees: what comes while replicas start."""
LATE_FACTOR = 2.0
"""So many times the share that an objective lets be late, predicted late lately, asks for one
more."""
MIN_LATE = 3.0
"""Fewer late requests than this say nothing."""
BATCH_S = 1800.0
"""The same of batches: nobody waits for them."""

Cause = Literal[
    "least",
    "arrivals",
    "roles",
    "waiting",
    "late",
    "kv",
    "batches",
    "busy",
    "idle",
    "usual",
    "cooldown",
]
"""Why so many: `least`: the settings say it. `arrivals`: what is forecast to come. `roles`: fewer
would do for that if some of them computed prompts for the others. `waiting`: what waits already.
`late`: first tokens are predicted later than they may be. `kv`: the KV cache. `batches`: batches
that wait. `busy`: something runs or is asked. `idle`: nothing was asked for long. `usual`: on other
days something comes soon. `cooldown`: so many were needed lately."""


class PoolBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a model that a decision keeps to."""

    least: int
    most: int
    slo: Slo
    """The interactive lane's."""
    target: float = 0.99
    """The share of requests that is to meet it."""
    cooldown_s: float = 120.0
    idle_s: float = 900.0


class PoolObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a model at a moment, as far as its pool is concerned."""

    now_s: float
    running: int
    """Replicas there are, those that start counted and those that end left out."""
    load: PoolLoad
    """Forecast for when a replica that is started now serves."""
    rate: float = 0.0
    """Requests a second, now."""
    expected_rate: float = 0.0
    """The same as it is forecast."""
    start_s: float
    """How long a replica takes to start."""
    waiting_s: float = 0.0
    """Seconds of one replica's work that wait, but for batches."""
    batch_waiting_s: float = 0.0
    kv_used: float = 0.0
    """The KV that requests hold at all replicas together, in caches of one."""
    late: float = 0.0
    """Requests of the last minute whose first token was predicted later than it may be, those that
    were refused for it counted."""
    asked: float = 0.0
    """Requests of the last minute."""
    since_growth_s: float = math.inf
    """Since a replica was last wanted that was not there."""
    idle_for_s: float = 0.0
    """Since anything was asked or ran."""
    expects_some: bool = False
    """On other days something is asked about now."""


class Reason(msgspec.Struct, frozen=True):
    cause: Cause
    replicas: int
    text: str


class PastNeed(msgspec.Struct, frozen=True, array_like=True):
    """Keeps what was needed at a moment."""

    at_s: float
    replicas: int


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    wanted: int
    needed: int
    """Without the cool-down."""
    reasons: tuple[Reason, ...]
    """The one that counts first."""
    past: tuple[PastNeed, ...] = ()
    """For the next decision: each later need that is larger than all after it."""

    @property
    def why(self) -> str:
        return self.reasons[0].text


def decide(seen: PoolObservation, bounds: PoolBounds, past: tuple[PastNeed, ...] = ()) -> Decision:
    """`past`: of the decision before."""
    reasons = [*_reasons(seen, bounds)]
    needed = max(bounds.least, min(bounds.most, max(each.replicas for each in reasons)))
    since_s = seen.now_s - bounds.cooldown_s
    # Only needs that no later one reaches can be the largest of what is left of the window.
    kept = [e for e in past if e.at_s > since_s and e.replicas > needed]
    kept.append(PastNeed(seen.now_s, needed))
    wanted = min(bounds.most, kept[0].replicas)
    if seen.running < wanted and kept[0].replicas > needed:
        # A cool-down keeps what is there; it starts nothing.
        wanted = max(needed, seen.running)
    if wanted > needed:
        left_s = kept[0].at_s - since_s
        text = f"{kept[0].replicas} were needed {bounds.cooldown_s - left_s:.0f} s ago"
        reasons.append(Reason("cooldown", wanted, f"{text}: {left_s:.0f} s of cool-down are left"))
    reasons.sort(key=lambda each: -min(each.replicas, bounds.most))
    return Decision(wanted=wanted, needed=needed, reasons=tuple(reasons), past=tuple(kept))


def _reasons(seen: PoolObservation, bounds: PoolBounds) -> list[Reason]:
    """Return what is needed by each of the causes that say something; one at least."""
    load, most, late = seen.load, bounds.most, 1 - bounds.target
    found: list[Reason] = []
    target = 1 - PLANNED_LATE * late
    arrivals = replicas_needed(load, bounds.slo, target, most)
    if arrivals:
        share = late_share(load, bounds.slo, arrivals)
        text = (
            f"{seen.expected_rate:.2f} requests/s are forecast for in {seen.start_s:.0f} s "
            f"({seen.rate:.2f} now): {load.work_s:.2f} replicas' work a second, "
            f"{100 * share:.1f} % late with {arrivals}"
        )
        found.append(Reason("arrivals", arrivals, text))
        roles = roles_needed(load, bounds.slo, target, arrivals - 1)
        if roles is not None:
            prefill, decode = roles
            text = f"prefill = {prefill} and decode = {decode} are expected to do for what comes"
            found.append(Reason("roles", prefill + decode, f"{text}: {said_of(load.transfer)}"))
    too_much_s = seen.waiting_s - seen.running * bounds.slo.ttft_s
    if too_much_s > 0:
        waiting = math.ceil(load.work_s + too_much_s / CLEAR_S)
        text = f"{seen.waiting_s:.1f} s of work wait, to be done within {CLEAR_S:.0f} s"
        found.append(Reason("waiting", waiting, text))
    if seen.batch_waiting_s > 0:
        batches = math.ceil(seen.batch_waiting_s / BATCH_S)
        found.append(Reason("batches", batches, f"{seen.batch_waiting_s:.0f} s of batches wait"))
    if seen.kv_used > 0:
        text = f"requests hold the KV caches of {seen.kv_used:.2f} replicas"
        found.append(Reason("kv", math.ceil(seen.kv_used / MOST_KV_USED), text))
    has_settled = seen.since_growth_s > seen.start_s + CLEAR_S
    if has_settled and seen.late >= max(MIN_LATE, LATE_FACTOR * late * seen.asked):
        text = f"{seen.late:.0f} of {seen.asked:.0f} first tokens of a minute were predicted late"
        found.append(Reason("late", seen.running + 1, text))
    if bounds.least == 0:
        found.append(_of_the_last(seen, bounds))
    found.append(Reason("least", bounds.least, f"the settings want {bounds.least} at least"))
    return found


def said_of(transfer: PromptTransfer | None) -> str:
    """Say how long a prompt takes to be read, and how that is known."""
    if transfer is None:
        return "no replica can read what another one computed"
    how = "as learnt here" if transfer.is_learnt else "as assumed, nothing was read here yet"
    return f"{transfer.seconds:.3g} s to read {transfer.tokens:.0f} tokens of a prompt, {how}"


def _of_the_last(seen: PoolObservation, bounds: PoolBounds) -> Reason:
    """Tell whether a model that may be at zero wants a replica at all."""
    if seen.idle_for_s < bounds.idle_s:
        since = f"{seen.idle_for_s:.0f} s ago" if seen.idle_for_s else "now"
        return Reason("busy", 1, f"last asked {since}, kept for {bounds.idle_s:.0f} s")
    if seen.expects_some:
        return Reason("usual", 1, "on other days something is asked about now")
    return Reason("idle", 0, f"nothing was asked for {seen.idle_for_s:.0f} s")
