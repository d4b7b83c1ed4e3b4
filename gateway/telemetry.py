"""Measures what the gateway does; the only place that names a metric.

Labels are bounded: a route's template, a configured model's name, a status, a token kind; never a
key, a user or a prompt. Names follow vLLM's where users know those.
"""

from __future__ import annotations

import os
import time
from collections import Counter as Counted
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from billing.events import UsageEvent
from engine.fairness import LANE_WEIGHTS
from engine.protocol import Lane, ReplicaStatus
from foundation.request_context import current_stages
from foundation.stages import Stage
from gateway.generation_events import CacheOutcome, MeteredUsage, RawBody, ReplicaEvent
from gateway.lanes import ServedRequest, Slo, SloOutcome, judge

T = TypeVar("T")
CONTENT_TYPE = "text/plain; version=0.0.4"
"""Prometheus' text format; Litestar adds the charset to each `text/`."""
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.12, 0.14, 0.16, 0.18, 0.2, 0.225),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0),
)
ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
ENGINE_GAUGES = {
    "num_running": ("num_requests_running", "Requests in the batch."),
    "num_waiting": ("num_requests_waiting", "Requests queued."),
    "kv_cache_usage": ("kv_cache_usage_perc", "KV blocks held, 0 to 1."),
    "num_blocks": ("kv_cache_blocks", "KV blocks there are."),
    "num_leased_blocks": (
        "kv_cache_leased_blocks",
        "KV blocks that are kept for a time for who paid for it.",
    ),
    "prefix_cache_hit_tokens": (
        "prefix_cache_hit_tokens",
        "Prompt tokens found in the prefix cache since its start.",
    ),
    "prefix_cache_query_tokens": (
        "prefix_cache_query_tokens",
        "Prompt tokens looked up since the engine's start.",
    ),
    "num_preemptions": ("num_preemptions", "Preemptions since the engine's start."),
    "generated_tokens": ("generation_tokens", "Tokens generated since the engine's start."),
    "num_draft_tokens": (
        "spec_decode_draft_tokens",
        "Guessed tokens verified since the engine's start.",
    ),
    "num_accepted_tokens": (
        "spec_decode_accepted_tokens",
        "Guessed tokens that were right, since then.",
    ),
}
"""By the field of `ReplicaStatus`: the metric that shows it, by model, and its help text. Every
worker hears the same engine, so the most recent word is the right one."""
COMPONENT_STATES = {
    "spool": ("ok", "low_space", "quarantine", "full", "broken"),
    "postgres": ("unknown", "ok", "failing", "unreachable"),
    "redis": ("unknown", "ok", "failing", "unreachable"),
    "engine": ("ok", "unreachable"),
    "upstream": ("unknown", "ok", "resting", "failing", "unreachable", "unauthorised"),
}
"""The states of each kind of part that requests depend on, as `gateway.health` finds them."""
UNKNOWN_MODEL = "-"
UPSTREAM_STATES = ("closed", "trying", "resting")
"""Those of `mcp_bridge.upstream.circuit_breaker`, the worst last."""
METRICS_FILE_BYTES = 4 * 1024 * 1024
"""Room for some 30,000 series of a kind."""
FILES_OF_METRICS = (
    *("counter", "histogram"),
    *("gauge_livesum", "gauge_livemin", "gauge_livemax", "gauge_mostrecent"),
)
"""The kinds that prometheus-client keeps in a file each."""
MAX_CHILDREN = 4096
"""How many label combinations of one metric are cached."""


class LaneCounts(Protocol):
    """A queue in front of a model that counts its requests in each lane."""

    num_waiting: dict[Lane, int]
    num_served: dict[Lane, int]


class Telemetry:
    """The metrics of one process. `shared_folder` is prometheus-client's PROMETHEUS_MULTIPROC_DIR,
    None for one process alone."""

    def __init__(self, *, models: Iterable[str], shared_folder: Path | None = None) -> None:
        self.models = frozenset(models)
        self._shown: dict[str, frozenset[Any]] = {}
        """The labels of gauges that were set the last time, by what they are of."""
        self.shared_folder = shared_folder
        if shared_folder is not None:
            reserve_disk(shared_folder)
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "tollgate_requests",
            "HTTP requests answered; 499: the client left first.",
            ["route", "model", "status"],
            registry=registry,
        )
        self.tokens = Counter(
            "tollgate_tokens",
            "Metered tokens: uncached, cache_read, cache_write, output.",
            ["model", "kind"],
            registry=registry,
        )
        self.ttft = Histogram(
            "tollgate_time_to_first_token_seconds",
            "From a request's first byte read to the first byte written of a stream that shows a "
            "token, or to the first token of a whole answer, where it can be told from the last.",
            ["model"],
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.itl = Histogram(
            "tollgate_inter_token_latency_seconds",
            "Between one step of a request that brought tokens and the next.",
            ["model"],
            buckets=ITL_BUCKETS_S,
            registry=registry,
        )
        self.queue_time = Histogram(
            "tollgate_request_queue_time_seconds",
            "Before it was begun: in the engine, or here, for an upstream's max_concurrency.",
            ["model"],
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        # What every request asks for: `labels` takes longer than to count.
        self.requests_of = lru_cache(MAX_CHILDREN)(self.requests.labels)
        self.tokens_of = lru_cache(MAX_CHILDREN)(self.tokens.labels)
        self.ttft_of = lru_cache(MAX_CHILDREN)(self.ttft.labels)
        self.itl_of = lru_cache(MAX_CHILDREN)(self.itl.labels)
        self.queue_time_of = lru_cache(MAX_CHILDREN)(self.queue_time.labels)
        self.engine_gauges = {
            field: Gauge(
                f"tollgate_{name}",
                text,
                ["model"],
                registry=registry,
                multiprocess_mode="mostrecent",
            )
            for field, (name, text) in ENGINE_GAUGES.items()
        }
        self.cache_leases = Counter(
            "tollgate_cache_leases",
            "Leases on prefixes: granted, then kept; all other outcomes are refunded.",
            ["model", "outcome"],
            registry=registry,
        )
        self._make_slo_metrics()
        self._make_worker_gauges()

    def _make_slo_metrics(self) -> None:
        self.slo_requests = Counter(
            "tollgate_slo_requests",
            "Requests judged by their service level objective ([slo]): met; late_first_token, "
            "slow_tokens, failed. Goodput is the share of those that met it.",
            ["model", "lane", "outcome"],
            registry=self.registry,
        )
        self.slo_requests_of = lru_cache(MAX_CHILDREN)(self.slo_requests.labels)

    def _make_worker_gauges(self) -> None:
        self.upstream_running, self.upstream_waiting = (
            self._worker_gauge(f"upstream_requests_{state}", text, "model", "lane")
            for state, text in (
                ("running", "Requests that an upstream with a max_concurrency works on."),
                ("waiting", "Requests that wait here for such an upstream."),
            )
        )
        self.spool_backlog = self._worker_gauge(
            "spool_backlog_events", "Usage events on disk that Postgres does not have yet."
        )
        self.spool_free_bytes = Gauge(
            "tollgate_spool_free_bytes",
            "Room on the disk that usage is recorded on before Postgres has it.",
            registry=self.registry,
            multiprocess_mode="livemin",
        )
        self.component_states = self._worker_gauge(
            "components",
            "Workers by how they find each part that requests depend on (/v1/admin/health).",
            *("kind", "name", "state"),
        )
        self.open_calls = self._worker_gauge("open_calls", "Requests for a model under way.")
        self.tasks = self._worker_gauge("tasks", "Tasks of the event loops.")
        self.upstream_disputes = Counter(
            "tollgate_upstream_disputes",
            "Answers of an upstream (model/position) that claim more than the request can have "
            "used.",
            ["upstream"],
            registry=self.registry,
        )
        self.upstream_disputed_tokens = Counter(
            "tollgate_upstream_disputed_tokens",
            "Tokens that upstreams claimed beyond that: input, output; billed to nobody.",
            ["upstream", "kind"],
            registry=self.registry,
        )
        self._make_log_metrics()
        self.request_rows_dropped = Counter(
            "tollgate_request_rows_dropped",
            "Requests that are missing in the log of requests: Postgres was away for too long.",
            registry=self.registry,
        )
        self._make_delivery_metrics()
        self._make_mcp_metrics()
        self.usage_conflicts = self._worker_gauge(
            "usage_conflicts", "Alarm: events that came again under their id with other content."
        )
        self.usage_refused = self._worker_gauge(
            "usage_refused", "Alarm: events that Postgres refuses or that were damaged."
        )
        self.spool_quarantined = Gauge(
            "tollgate_spool_quarantined_records",
            "Alarm: records of this host's spools that wait for `tollgate spool accept|discard`.",
            registry=self.registry,
            multiprocess_mode="livemax",  # each worker counts them all
        )

    def _make_delivery_metrics(self) -> None:
        self.webhook_attempts = Counter(
            "tollgate_webhook_attempts",
            "Attempts to deliver an event: delivered, failed (tried again), dead (given up).",
            ["outcome"],
            registry=self.registry,
        )
        self.mail_attempts = Counter(
            "tollgate_mail_attempts",
            "Attempts to tell a person of an event by e-mail: delivered, failed (tried again), "
            "dead (given up).",
            ["outcome"],
            registry=self.registry,
        )

    def _make_log_metrics(self) -> None:
        self.access_lines_dropped = Counter(
            "tollgate_access_lines_dropped",
            "Lines of the access log that were not written: the disk is full, or nobody reads.",
            registry=self.registry,
        )
        self.spans_sent = Counter(
            "tollgate_spans_sent",
            "Spans of traces that the collector took.",
            registry=self.registry,
        )
        self.spans_lost = Counter(
            "tollgate_spans_lost",
            "Spans that were not sent: the collector is away or slow, and no more of them wait.",
            registry=self.registry,
        )

    def _make_mcp_metrics(self) -> None:
        self.mcp_calls = Counter(
            "tollgate_mcp_calls",
            "Tool calls that went out to MCP servers: done, asked (the client is to answer first), "
            "failed, left (nobody waited).",
            ["server", "outcome"],
            registry=self.registry,
        )
        self.mcp_scan_texts = Counter(
            "tollgate_mcp_scan_texts",
            "Sentences of MCP offers that the gateway had embedded for itself: embedded, failed.",
            ["outcome"],
            registry=self.registry,
        )
        self.mcp_upstreams = self._worker_gauge(
            "mcp_upstreams",
            "Who MCP servers are asked for (tenants or users, by worker), by what the server is to "
            "them: closed (asked as usual), resting (it failed), trying.",
            "server",
            "state",
        )

    def _worker_gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Each worker knows its own part; the whole is their sum."""
        return Gauge(
            f"tollgate_{name}", text, labels, registry=self.registry, multiprocess_mode="livesum"
        )

    def engine_status(self, status: ReplicaStatus) -> None:
        for field, gauge in self.engine_gauges.items():
            gauge.labels(status.model).set(getattr(status, field))

    def cache_leases_became(self, model: str, outcome: str, number: int) -> None:
        self.cache_leases.labels(self.label(model), outcome).inc(number)

    def waiting_rooms(self, model: str, rooms: Sequence[LaneCounts]) -> None:
        for lane in LANE_WEIGHTS:
            running = sum(room.num_served[lane] for room in rooms)
            waiting = sum(room.num_waiting[lane] for room in rooms)
            self.upstream_running.labels(model, lane).set(running)
            self.upstream_waiting.labels(model, lane).set(waiting)

    def mcp_health(self, servers: Iterable[str], found: Iterable[tuple[str, str]]) -> None:
        """`servers`: those of the settings. `found`: a server and its state, of each upstream."""
        counted, named = Counted(found), frozenset(servers)
        for server in named | self._gone("servers", named):
            for state in UPSTREAM_STATES:
                self.mcp_upstreams.labels(server, state).set(counted[server, state])

    def components(self, found: Iterable[tuple[str, str, str]]) -> None:
        """`found`: kind, name and state of each."""
        states = {(kind, name): state for kind, name, state in found}
        for kind, name in states.keys() | self._gone("components", frozenset(states)):
            for each in COMPONENT_STATES[kind]:
                self.component_states.labels(kind, name, each).set(each == states.get((kind, name)))

    def zero_gone(self, *, engines: Iterable[str], rooms: Iterable[str]) -> None:
        """Set the gauges of models that are not served any more to zero: a file that processes
        share forgets none."""
        for model in self._gone("engines", frozenset(engines)):
            for gauge in self.engine_gauges.values():
                gauge.labels(model).set(0)
        for model in self._gone("rooms", frozenset(rooms)):
            self.waiting_rooms(model, ())

    def _gone(self, what: str, now: frozenset[T]) -> frozenset[T]:
        """Return what was there the last time and is not now."""
        before, self._shown[what] = self._shown.get(what, frozenset()), now
        return before - now

    def count_tokens(
        self, model: str, *, uncached: int, cache_read: int, cache_write: int, output: int
    ) -> None:
        """Count what was billed, whoever billed it."""
        label = self.label(model)
        for kind, count in (
            ("uncached", uncached),
            ("cache_read", cache_read),
            ("cache_write", cache_write),
            ("output", output),
        ):
            counted = self.tokens_of(label, kind)
            if count:
                counted.inc(count)

    def count_disputed(self, upstream: str, *, input_tokens: int, output_tokens: int) -> None:
        """`upstream`: the name of a replica of the settings."""
        self.upstream_disputes.labels(upstream).inc()
        for kind, count in (("input", input_tokens), ("output", output_tokens)):
            if count:
                self.upstream_disputed_tokens.labels(upstream, kind).inc(count)

    def answered(self, *, route: str, model: str, status: str) -> None:
        self.requests_of(route, self.label(model), status).inc()

    def know(self, models: Iterable[str]) -> None:
        """Count these models by their names, too. Those that are gone keep what was counted."""
        self.models |= frozenset(models)

    def label(self, model: str) -> str:
        return model if model in self.models else UNKNOWN_MODEL

    def render(self) -> bytes:
        return generate_latest(self._gathered())

    def num_open_calls(self) -> int:
        """Return the requests for a model under way in all workers, as each of them has last
        observed it."""
        return int(self._gathered().get_sample_value("tollgate_open_calls") or 0)

    def _gathered(self) -> CollectorRegistry:
        """Return the metrics of all workers."""
        if self.shared_folder is None:
            return self.registry
        gathered = CollectorRegistry()
        MultiProcessCollector(gathered, path=str(self.shared_folder))
        return gathered

    def close(self, pid: int) -> None:
        """Take this worker's live gauges out of the shared sum."""
        if self.shared_folder is not None:
            mark_process_dead(pid, path=str(self.shared_folder))


def reserve_disk(shared_folder: Path) -> None:
    """Make this process's files of metrics, with disk space for all that they will hold.

    prometheus-client maps sparse files. A write to such a mapping on a full disk kills the process
    (SIGBUS), when a page is touched for the first time. A file gets its name once it has its size:
    an empty one fails whoever reads those of all workers. Raises: OSError.
    """
    for name in FILES_OF_METRICS:
        path = shared_folder / f"{name}_{os.getpid()}.db"
        is_new = not path.exists()  # else of an earlier process of the same number: it goes on
        reserved = path.with_suffix(".new") if is_new else path
        fd = os.open(reserved, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, METRICS_FILE_BYTES)
        finally:
            os.close(fd)
        if is_new:
            reserved.rename(path)


class Pace:
    """Adds up how long tokens took after the first of each generation."""

    __slots__ = ("seconds", "tokens")

    def __init__(self) -> None:
        self.seconds, self.tokens = 0.0, 0

    def add(self, seconds: float, tokens: int) -> None:
        self.seconds += seconds
        self.tokens += tokens


class RequestMeter:
    """Times one request's tokens and counts them. `received_at`: when its first byte was read, in
    seconds of `time.perf_counter`; None: now."""

    def __init__(
        self, telemetry: Telemetry, model: str, *, received_at: float | None = None
    ) -> None:
        self._telemetry = telemetry
        self._model = telemetry.label(model)
        self._received_at = time.perf_counter() if received_at is None else received_at
        self.awaits_write = False
        """True from a stream's first token on, until it is queued to be written."""
        self._last_at: float | None = None
        self._num_tokens = 0
        self.ttft_s: float | None = None
        self.lane: Lane | None = None
        self.slo: Slo | None = None
        """None, as its lane: it was refused before anybody understood it."""
        self.slo_outcome: SloOutcome | None = None
        self._pace = Pace()
        self.queue_time_s: float | None = None
        self.cache: CacheOutcome | None = None
        """Why no more of its prompt was cached, of its first generation."""
        self.billed: list[UsageEvent] = []
        """The bills of all generations of the request."""
        self.stages = current_stages()
        """The stages of the request, over all its generations."""
        self._attempt: Stage | None = None
        self._begun_at = 0.0
        """When the replica began to work on it, after its queue."""
        self._decode: Stage | None = None

    def again(self) -> RequestMeter:
        """Return a meter for another generation of the same request."""
        meter = RequestMeter(self._telemetry, self._model)
        meter.billed, meter._pace = self.billed, self._pace
        meter.stages = self.stages
        return meter

    def begin_attempt(self, replica: str, ref: str = "") -> Stage:
        """Begin the stage of a try on a replica, which `received` divides further. `ref`: the id of
        its usage."""
        attempt = self._attempt = self.stages.begin("attempt", replica)
        attempt.ref = ref
        self._begun_at, self._decode = attempt.began_at, None
        return attempt

    def received(self, event: ReplicaEvent, *, streams: bool) -> None:
        """Count what a replica's step brought, whether or not the client is shown it yet. streams:
        the client is shown it before the answer is whole, and `wrote_first` tells when."""
        if event.queue_time_s is not None and self.queue_time_s is None:
            self.queue_time_s = event.queue_time_s
            self._add_queue(event.queue_time_s)
            self._telemetry.queue_time_of(self._model).observe(event.queue_time_s)
        usage = event.usage
        if usage is None or is_told_at_once(event):
            return
        num_tokens = usage.output + usage.wasted_output
        if num_tokens == self._num_tokens:
            return
        more, self._num_tokens = num_tokens - self._num_tokens, num_tokens
        now = time.perf_counter()
        if self._last_at is None:
            self.awaits_write = streams
            if not streams:
                self.wrote_first()
        else:
            step_s = now - self._last_at
            self._telemetry.itl_of(self._model).observe(step_s)
            self._pace.add(step_s, more)
        self._last_at = now
        if self._decode is not None:
            self._decode.ended_at = now
        else:
            self._add_prefill(now)

    def _add_queue(self, queue_time_s: float) -> None:
        """Note how long the attempt waited before it was begun."""
        attempt = self._attempt
        if attempt is not None:
            self._begun_at = attempt.began_at + queue_time_s
            self.stages.add(Stage("queue", attempt.began_at, self._begun_at, within=attempt))

    def _add_prefill(self, now: float) -> None:
        """Note that the attempt's first token came now; each one from here on is decoded."""
        attempt = self._attempt
        if attempt is not None:
            self.stages.add(Stage("prefill", min(self._begun_at, now), now, within=attempt))
            self._decode = self.stages.add(Stage("decode", now, now, within=attempt))

    def disputed(self, upstream: str, usage: MeteredUsage) -> None:
        """Count what an upstream claims beyond what the request can have used."""
        self._telemetry.count_disputed(
            upstream,
            input_tokens=usage.disputed_input,
            output_tokens=usage.disputed_output,
        )

    def wrote_first(self) -> None:
        """Note that the first byte is written of what shows the first token."""
        self.ttft_s = time.perf_counter() - self._received_at
        self._telemetry.ttft_of(self._model).observe(self.ttft_s)

    def promise(self, lane: Lane, slo: Slo) -> None:
        """Note what the request will be judged by."""
        self.lane, self.slo = lane, slo

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first, over all generations of the request."""
        return self._pace.seconds / self._pace.tokens if self._pace.tokens else None

    def judge(self, status: int) -> None:
        """Count whether the request, which has ended now, met its SLO."""
        if self.slo is None or self.lane is None:
            return
        served = ServedRequest(
            status,
            time.perf_counter() - self._received_at,
            self.ttft_s,
            self.tpot_s,
            sum(each.quantities.output_total for each in self.billed),
        )
        self.slo_outcome = judge(self.slo, served)
        if self.slo_outcome is not None:
            self._telemetry.slo_requests_of(self._model, self.lane, self.slo_outcome).inc()

    def used(self, usage: MeteredUsage, event: UsageEvent) -> None:
        """Count what was billed. `event`: its record in the books."""
        self.billed.append(event)
        self._telemetry.count_tokens(
            self._model,
            uncached=usage.uncached_input + usage.embedding_input,
            cache_read=usage.cache_read,
            cache_write=usage.cache_write + usage.cache_write_1h,
            output=usage.output,
        )


def is_told_at_once(event: ReplicaEvent) -> bool:
    """Tell whether an event's tokens came some time before it: an upstream's whole body, or a count
    at the end of what was not seen coming."""
    if event.finished and not event.items:
        return True
    return any(isinstance(item, RawBody) for item in event.items)
