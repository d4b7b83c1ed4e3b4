"""Makes the row of the request log of each answered request for a model, in the thread of the
access log.

A request that nobody signed is no tenant's and has no row; nor has what is asked beside inference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import UNSET

from foundation.stages import Stage
from gateway.batches.states import MESSAGES
from gateway.principal import Principal
from gateway.request_log.rows import RequestRow, StageRow
from gateway.routes.asgi.access_log import AccessLine, NotedAnswer, TokenCounts
from gateway.telemetry.metrics import UNKNOWN_MODEL
from gateway.telemetry.request_meter import RequestMeter
from gateway.wire.surfaces import RESPONSES, SURFACES

PLAYGROUND = "/console/playground/completions"
ROUTES = frozenset({*SURFACES, RESPONSES, MESSAGES, PLAYGROUND})
"""The templates of the routes that ask a model."""
REQUEST_PREFIX = "req_"
MAX_STAGES = 64
"""A row keeps as many, in some 8 KB at most."""
MAX_TEXT_CHARS = 80
MAX_INT = 2**31 - 1
MAX_BIGINT = 2**63 - 1
MICROSECONDS = 1_000_000


def recording(put: Callable[[RequestRow], None]) -> Callable[[NotedAnswer, AccessLine], None]:
    """Return what an access log calls for each answer."""

    def record(answer: NotedAnswer, line: AccessLine) -> None:
        row = to_row(answer, line)
        if row is not None:
            put(row)

    return record


def to_row(answer: NotedAnswer, line: AccessLine) -> RequestRow | None:
    """Make the row of an answer; None: it has none."""
    who = answer.principal
    if not isinstance(who, Principal) or answer.context is None or answer.route not in ROUTES:
        return None
    made = answer.context.request.removeprefix(REQUEST_PREFIX)
    meter = answer.meter
    cache = None if meter is None else meter.cache
    tokens = line.tokens if isinstance(line.tokens, TokenCounts) else TokenCounts()
    cost = 0 if line.cost_pico_usd is UNSET else line.cost_pico_usd
    return RequestRow(
        id=made,
        at_ms=int(made[:12], 16),
        org=who.org_id,
        project=who.project_id,
        key=who.key_id,
        model=UNKNOWN_MODEL if line.model is UNSET else line.model,
        lane=lane_of(who, meter),
        route=answer.route,
        status=line.status,
        is_good=None if meter is None or not meter.slo_outcome else meter.slo_outcome == "met",
        duration_us=round(answer.duration_s * MICROSECONDS),
        ttft_us=None if meter is None else to_us(meter.ttft_s),
        tpot_us=None if meter is None else to_us(meter.tpot_s),
        queue_us=None if meter is None else to_us(meter.queue_time_s),
        uncached_tokens=min(tokens.uncached + tokens.embedding, MAX_INT),
        cached_tokens=min(tokens.cache_read, MAX_INT),
        written_tokens=min(tokens.cache_write, MAX_INT),
        output_tokens=min(tokens.output + tokens.reasoning, MAX_INT),
        reasoning_tokens=min(tokens.reasoning, MAX_INT),
        cost_pico=min(cost, MAX_BIGINT),
        trace=answer.context.trace,
        stages=stages_of(answer.context.stages, answer.began_at),
        cache_cause=None if cache is None else cache.cause,
        cache_position=None if cache is None else min(cache.position, MAX_INT),
    )


def lane_of(who: Principal, meter: RequestMeter | None) -> str:
    """Return the lane that a request was in, or would have been in where it was refused."""
    if meter is not None and meter.lane is not None:
        return meter.lane
    return who.org_plan.lane or who.key_lane or "interactive"


def stages_of(stages: Sequence[Stage], began_at: float) -> list[StageRow] | None:
    """Return the first stages of a request, and the last one where some are left out."""
    if not stages:
        return None
    kept = [*stages[: MAX_STAGES - 1], stages[-1]] if len(stages) > MAX_STAGES else stages
    return [
        StageRow(
            name=each.name,
            began_us=round((each.began_at - began_at) * MICROSECONDS),
            took_us=round(max(0.0, each.ended_at - each.began_at) * MICROSECONDS),
            about=printable(each.about),
            outcome=printable(each.outcome),
        )
        for each in kept
    ]


def printable(text: str) -> str:
    """Return what a table takes of a text from elsewhere, such as the name of a tool."""
    text = text[:MAX_TEXT_CHARS]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def to_us(seconds: float | None) -> int | None:
    return None if seconds is None else max(0, round(seconds * MICROSECONDS))
