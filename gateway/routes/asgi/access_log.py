"""Writes one line for each HTTP request that was answered, in the log of its worker.

A line says who asked for what and what came of it: the id of a key, a route's template and a
configured model's name; never a path, a key or a prompt, and an address only if the operator asks
for it. The request itself waits for nothing: it appends what is known, and a thread makes the line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from msgspec import UNSET, Struct, UnsetType

from foundation.logs import LineWriter, to_time
from foundation.trace_context import TracePolicy
from gateway.request_log.answers import NotedAnswer, TokenCounts, printable, sum_up
from gateway.settings.file import LogsConfig
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter

LONGEST_SETTLING_S = 1.0
"""How long after its answer a line waits for what is still done for the request."""
CLOSE_TIMEOUT_S = 2.0
"""How long the last lines may take at the end of a worker."""


class AccessLine(Struct):
    """The line as it is written; the first fields are those of every line of a log."""

    time: str
    level: str
    process: str
    logger: str
    message: str
    method: str
    route: str
    status: int
    duration_ms: float
    request: str | UnsetType = UNSET
    trace: str | UnsetType = UNSET
    client_trace: str | UnsetType = UNSET
    """The trace that the client named, where it is not continued."""
    key: str | UnsetType = UNSET
    org: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    tokens: TokenCounts | UnsetType = UNSET
    cost_pico_usd: int | UnsetType = UNSET
    ttft_ms: float | UnsetType = UNSET
    queue_ms: float | UnsetType = UNSET
    client: str | UnsetType = UNSET
    kind: str | UnsetType = UNSET
    """Unset: it is an HTTP request whose answer is all of it."""
    error_code: str | UnsetType = UNSET


class AccessLog:
    """Makes the lines of one worker. `write`: takes whole lines, in a thread of this log.
    `on_answer`: hears of each there, also where the settings want no lines. `policy`: which
    traces are recorded and passed on."""

    def __init__(
        self,
        config: LogsConfig,
        telemetry: Telemetry,
        write: Callable[[bytes], object],
        *,
        process: str,
        on_answer: Callable[[NotedAnswer, AccessLine], None] | None = None,
        policy: TracePolicy | None = None,
    ) -> None:
        self.policy = policy
        self.shows_client = config.client_address
        self._json, self._writes_lines = config.format == "json", config.access
        self._on_answer = on_answer
        self._telemetry, self._process = telemetry, process
        self._writer = LineWriter[NotedAnswer](
            self._encode,
            write,
            telemetry.access_lines_dropped.inc,
            name="access log",
            is_ready=is_over,
        )
        self.note = self._writer.put

    @contextmanager
    def running(self) -> Iterator[AccessLog]:
        self._writer.start()
        try:
            yield self
        finally:
            self._writer.close(CLOSE_TIMEOUT_S)

    def to_line(self, answer: NotedAnswer) -> AccessLine:
        line = AccessLine(
            time=to_time(answer.ended_at),
            level="info",
            process=self._process,
            logger="access",
            message=f"{answer.method} {answer.route} {answer.status}",
            method=answer.method,
            route=answer.route,
            status=int(answer.status),
            duration_ms=to_ms(answer.duration_s),
        )
        if answer.context is not None:
            line.request, line.trace = answer.context.request, answer.context.trace
            line.client_trace = answer.context.client_trace or UNSET
        if answer.principal is not None:
            line.key, line.org = answer.principal.key_id, answer.principal.org_id
        if answer.model:
            line.model = self._telemetry.label(answer.model)
        if answer.client is not None:
            line.client = answer.client
        if answer.error_code:
            line.error_code = printable(answer.error_code)
        if answer.kind != "request":
            line.kind = answer.kind
        if answer.meter is not None:
            add_times(line, answer.meter)
        if billed := answer.billed:
            line.tokens, line.cost_pico_usd = sum_up(billed)
        return line

    def _encode(self, answer: NotedAnswer) -> bytes:
        if self._telemetry.tenants is not None and answer.principal is not None:
            self._telemetry.tenants.answered(answer.principal.org_id, int(answer.status))
        if not self._writes_lines and self._on_answer is None:
            return b""
        line = self.to_line(answer)
        if answer.meter is not None and line.trace is not UNSET:
            answer.meter.exemplify(line.trace, answer.ended_at)
        if self._on_answer is not None:
            self._on_answer(answer, line)
        if not self._writes_lines:
            return b""
        return msgspec.json.encode(line) + b"\n" if self._json else to_human(line).encode()


def is_over(answer: NotedAnswer) -> bool:
    """Tell whether all that was done for the request has ended, which may be a little later than
    its answer: money that was held is given back. Then its stages have their times."""
    context = answer.context
    return (
        context is None
        or context.stages.have_ended
        or time.time() - answer.ended_at > LONGEST_SETTLING_S
    )


def add_times(line: AccessLine, meter: RequestMeter) -> None:
    if meter.ttft_s is not None:
        line.ttft_ms = to_ms(meter.ttft_s)
    if meter.queue_time_s is not None:
        line.queue_ms = to_ms(meter.queue_time_s)


def to_human(line: AccessLine) -> str:
    """Write the line for a person: the time of day, what was asked, and what came of it."""
    _, _, time_of_day = line.time.partition("T")
    told = [time_of_day.partition(".")[0], line.message, f"{line.duration_ms:.0f} ms"]
    if line.error_code is not UNSET:
        told.append(str(line.error_code))
    if line.model is not UNSET:
        told.append(str(line.model))
    if isinstance(line.tokens, TokenCounts):
        counts = msgspec.to_builtins(line.tokens)
        told.append(" ".join(f"{kind}={count}" for kind, count in counts.items()))
    told += [str(each) for each in (line.key, line.client) if each is not UNSET]
    if line.request is not UNSET:
        told.append(f"[{line.request}]")
    return " ".join(told) + "\n"


def to_ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
