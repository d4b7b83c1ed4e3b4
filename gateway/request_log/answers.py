"""Describes what was answered, whoever asked for it: a client, or a line of a batch; and makes its
row.

Its times are two: Unix seconds of the end, and `time.perf_counter` for what came before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from billing.events import UsageEvent
from billing.pricing.rating import rate
from foundation.request_context import LogContext
from foundation.stages import Stage
from gateway.principal import Principal
from gateway.request_log.histograms import pack, quantile_us
from gateway.request_log.rows import RequestRow, StageRow
from gateway.telemetry.request_meter import RequestMeter

REQUEST_PREFIX = "req_"
MAX_STAGES = 64
"""A row keeps as many, in some 8 KB at most."""
MAX_TEXT_CHARS = 80
MAX_ROUTE_CHARS = 1024
"""Bounds the text of why a replica was chosen: room for about thirty candidates."""
MAX_INT = 2**31 - 1
MAX_BIGINT = 2**63 - 1
MICROSECONDS = 1_000_000


AnswerKind = Literal["request", "queued", "background", "batch"]
"""`queued`: the answer says that the work goes on in the background, which is an answer, too, once
it has ended. `batch`: a line of one."""
Note = Callable[["NotedAnswer"], object]


def note_nothing(_answer: NotedAnswer) -> None:
    """Stand in for what notes answers, until that is there."""


class NotedAnswer(NamedTuple):
    """One request that was answered, as the layer that counts it knows it. `model`: as the client
    wrote it."""

    ended_at: float
    """Unix seconds."""
    duration_s: float
    method: str
    route: str
    status: str
    context: LogContext | None
    model: str
    principal: Principal | None
    meter: RequestMeter | None
    client: str | None
    began_at: float = 0.0
    """When it began, in seconds of `time.perf_counter` as the stages of its `context` are."""
    kind: AnswerKind = "request"
    bills: Sequence[UsageEvent] | None = None
    """The bills of it; None: those that its meter has."""
    error_code: str = ""
    """The code of the error that the client was told, or its type where it has none."""

    @property
    def billed(self) -> Sequence[UsageEvent]:
        if self.bills is not None:
            return self.bills
        return () if self.meter is None else self.meter.billed


class TokenCounts(Struct, omit_defaults=True):
    """Counts what was billed, over all generations of the request."""

    uncached: int = 0
    cache_read: int = 0
    cache_write: int = 0
    embedding: int = 0
    output: int = 0
    """Reasoning is not part of it."""
    reasoning: int = 0


class RequestOwner(NamedTuple):
    """Names whose a request is, and what it is counted by."""

    org: str
    project: str
    key: str
    model: str
    """The name of a configured model, or the one that stands for all others."""
    lane: str
    batch: str | None = None
    tags: Mapping[str, str] | None = None


def sum_up(events: Iterable[UsageEvent]) -> tuple[TokenCounts, int]:
    """Return the tokens of bills, and what they cost in pico-USD."""
    tokens, cost = TokenCounts(), 0
    for event in events:
        used = event.quantities
        tokens.uncached += used.uncached_input
        tokens.cache_read += used.cache_read
        tokens.cache_write += used.cache_write_5m + used.cache_write_1h
        tokens.embedding += used.embedding_input
        tokens.output += used.output
        tokens.reasoning += used.reasoning_output
        cost += rate(used, event.attempt.prices).amount_pico
    return tokens, cost


def to_row(
    owner: RequestOwner, answer: NotedAnswer, tokens: TokenCounts, cost_pico: int
) -> RequestRow:
    """Make the row of an answer, which has a context."""
    assert answer.context is not None
    made = answer.context.request.removeprefix(REQUEST_PREFIX)
    meter = answer.meter
    cache = None if meter is None else meter.cache
    return RequestRow(
        id=made,
        at_ms=int(made[:12], 16),
        org=owner.org,
        project=owner.project,
        key=owner.key,
        model=owner.model,
        lane=owner.lane,
        route=answer.route,
        status=int(answer.status),
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
        cost_pico=min(cost_pico, MAX_BIGINT),
        trace=answer.context.trace,
        stages=stages_of(answer.context.stages, answer.began_at),
        cache_cause=None if cache is None else cache.cause,
        cache_position=None if cache is None else min(cache.position, MAX_INT),
        batch=owner.batch,
        tags=owner.tags or None,
        error_code=printable(answer.error_code) or None,
        model_version=None if meter is None else meter.version,
        **({} if meter is None or meter.gaps.counts is None else gaps_of(meter.gaps.counts)),
    )


def gaps_of(counts: Sequence[int]) -> dict[str, Any]:
    """Return what a row says of the gaps between tokens. `counts`: by bucket."""
    median, most = quantile_us(counts, 0.5), quantile_us(counts, 0.99)
    if median is None or most is None:
        return {}
    return {"itl_p50_us": round(median), "itl_p99_us": round(most), "itl": pack(counts)}


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
            about=printable(
                each.about, MAX_ROUTE_CHARS if each.name == "route" else MAX_TEXT_CHARS
            ),
            outcome=printable(each.outcome),
        )
        for each in kept
    ]


def printable(text: str, most_chars: int = MAX_TEXT_CHARS) -> str:
    """Return what a table takes of a text from elsewhere, such as the name of a tool."""
    text = text[:most_chars]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def to_us(seconds: float | None) -> int | None:
    return None if seconds is None else max(0, round(seconds * MICROSECONDS))
