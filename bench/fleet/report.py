"""Reports what a router made of a trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from bench.fleet.world import FleetWorld, RequestFate
from bench.sim.cost import Cost
from bench.sim.report import percentile
from bench.sim.world import IDLE
from gateway.fleet.predicted_time import StepPrice
from gateway.lanes import Slo


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one run. Shares are 0 to 1."""

    hits: float
    """Prompt tokens that were found in caches."""
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    goodput: float
    """Requests within their objective, of all."""
    token_goodput: float
    """The same of tokens of prompts."""
    refused: float
    refused_tokens: float
    spread: float
    """The busiest replica's work over the mean: what steps take beyond their fixed part."""
    error_p90: float | None
    """How far predictions were from what came, over that."""


Limit = Callable[[RequestFate], float]
"""Returns how late the first token of a request may be."""


def report(
    world: FleetWorld, fates: Sequence[RequestFate], limit_s: Limit, tpot_s: float
) -> FleetReport:
    served = [fate for fate in fates if not fate.was_refused]
    good = [f for f in served if f.ttft_s <= limit_s(f) and f.tpot_s <= tpot_s]
    tokens = sum(fate.asked.input_length for fate in fates)
    lost = sum(fate.asked.input_length for fate in fates if fate.was_refused)
    busy = [replica.work_s for replica in world.replicas]
    errors = [
        abs(fate.predicted_s - fate.ttft_s) / fate.ttft_s
        for fate in served
        if fate.predicted_s is not None
    ]
    return FleetReport(
        hits=sum(fate.cached for fate in served) / max(1, tokens - lost),
        ttft_p50_s=percentile([fate.ttft_s for fate in served], 0.5),
        ttft_p99_s=percentile([fate.ttft_s for fate in served], 0.99),
        tpot_p99_s=percentile([fate.tpot_s for fate in served], 0.99),
        goodput=len(good) / len(fates),
        token_goodput=sum(fate.asked.input_length for fate in good) / tokens,
        refused=1 - len(served) / len(fates),
        refused_tokens=lost / tokens,
        spread=max(busy) * len(busy) / max(sum(busy), math.ulp(1.0)),
        error_p90=percentile(errors, 0.9) if errors else None,
    )


def fixed_limit(slo: Slo) -> Limit:
    return lambda _: slo.ttft_s


def limit_by_length(slo: Slo, cost: Cost, max_step_tokens: int) -> Limit:
    """Return the limit that grows with what a prompt takes an idle replica."""
    status = msgspec.structs.replace(IDLE, max_step_tokens=max_step_tokens)
    price = StepPrice.of(status, cost)
    return lambda fate: slo.first_token_limit_s(price.own_seconds(fate.asked.input_length))
