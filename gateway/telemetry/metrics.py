"""Measures what the gateway does; the only place that names a metric.

Labels are bounded: a route's template, a configured model's name, a status, a token kind; never a
key, a user or a prompt, and an organization in `gateway.telemetry.tenants` alone. Names follow
vLLM's where users know those.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter as Counted
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import mark_process_dead
from prometheus_client.registry import Collector

from billing.events import UsageEvent
from billing.money import PICO_PER_USD
from billing.pricing.rating import rate
from billing.spool.spool import SpoolCounts
from engine.fairness import LANE_WEIGHTS
from engine.protocol import Lane, ReplicaStatus
from gateway.lanes import SloTable
from gateway.telemetry.engine_gauges import EngineGauges
from gateway.telemetry.exposition import (
    PROTOBUF,
    WRITERS,
    Exposition,
    Measurements,
    negotiated,
    to_metric,
)
from gateway.telemetry.fleet_metrics import FleetMetrics
from gateway.telemetry.histograms import (
    PREFIX,
    SUFFIX,
    HistogramFamily,
    HistogramMemory,
    contents_of,
    records_of,
)
from gateway.telemetry.metric_group import MadeMetrics, MetricGroup
from gateway.telemetry.shared_files import gather, reserve_disk, share_values
from gateway.telemetry.tenants import TenantCounts, list_tenant_metrics

T = TypeVar("T")
TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.12, 0.14, 0.16, 0.18, 0.2, 0.225),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0),
)
ITL_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
LAG_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
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
GUARD_FINDINGS = frozenset(
    (
        *("not_approved", "definition_refused", "arguments", "approval_required"),
        *("denied", "not_granted", "rate", "budget", "tainted"),
        *("rate_limit_exceeded", "insufficient_quota", "limits_unavailable", "suspended"),
        *("not_accounted_for", "malformed", "too_many_notifications", "too_many_at_once"),
        *("result_withheld", "resource_hidden"),
    )
)
"""The reasons of `mcp_bridge.trust`; another one is counted as OTHER_FINDING."""
OFFER_FINDINGS = ("not_approved", "definition_refused", "result_withheld", "resource_hidden")
"""Those that say that a server's offer is not what was approved; the first one raises an alert."""
OTHER_FINDING = "other"
DELIVERY_OUTCOMES = ("delivered", "failed", "dead")
MCP_MODELS = "mcp"
MAX_CHILDREN = 4096
"""How many label combinations of one metric are cached."""


class RefusedByLimit(Protocol):
    """Names the owner of a limit that refused a request, and what it counts."""

    @property
    def scope(self) -> str: ...

    @property
    def kind(self) -> str: ...


class LaneCounts(Protocol):
    """A queue in front of a model that counts its requests in each lane."""

    num_waiting: dict[Lane, int]
    num_served: dict[Lane, int]


class Telemetry:
    """The metrics of one process. `shared_folder` is prometheus-client's PROMETHEUS_MULTIPROC_DIR,
    None for one process alone. `counts_tenants`: some metrics are counted by organization.
    `listed`: each metric as it is described to people."""

    def __init__(
        self,
        *,
        models: Iterable[str],
        shared_folder: Path | None = None,
        counts_tenants: bool = False,
    ) -> None:
        self.models = frozenset(models)
        self._shown: dict[str, frozenset[Any]] = {}
        """The labels of gauges that were set the last time, by what they are of."""
        self._states: dict[tuple[str, str], str] = {}
        """The states of components as they were set the last time, by their kind and name."""
        self.shared_folder = shared_folder
        memory = None
        if shared_folder is not None:
            reserve_disk(shared_folder)
            share_values(shared_folder)
            memory = shared_folder / f"{PREFIX}{os.getpid()}{SUFFIX}"
        self.made = MadeMetrics(HistogramMemory(memory), CollectorRegistry(), [], [])
        self.registry, self.listed = self.made.registry, self.made.listed
        self.registry.register(_OwnHistograms(self))
        self._make_request_metrics()
        self._make_slo_metrics()
        self._make_engine_metrics()
        self.fleet = FleetMetrics(MetricGroup("Fleet", self.made))
        self._make_upstream_metrics()
        self._make_money_metrics()
        tenant_metrics = list_tenant_metrics(MetricGroup("Tenants", self.made))
        self.tenants: TenantCounts | None = None
        if counts_tenants:
            self.tenants = TenantCounts(shared_folder, tenant_metrics)
            self.registry.register(self.tenants)
        self._make_process_metrics()
        self._make_mcp_metrics()

    # Each group of metrics, as docs/metrics.md has it.

    def _make_request_metrics(self) -> None:
        group = MetricGroup("Requests", self.made)
        self.requests = group.counter(
            "requests",
            "HTTP requests answered; 499: the client left first.",
            *("route", "model", "status"),
            do="5xx: `tollgate logs --level error` names the requests; 429 and 402 are limits.",
        )
        self.tokens = group.counter(
            "tokens",
            "Metered tokens: uncached, cache_read, cache_write, output.",
            *("model", "kind"),
            do="The share of cache_read is what callers save; the cache report says why it falls.",
        )
        self.ttft = group.histogram(
            "time_to_first_token_seconds",
            "From a request's first byte read to the first byte written of a stream that shows a "
            "token, or to the first token of a whole answer, where it can be told from the last.",
            "model",
            buckets=TTFT_BUCKETS_S,
            do="Look at the queue time beside it: waiting is cured by replicas, computing by "
            "shorter prompts or a better cache hit rate.",
        )
        self.itl = group.histogram(
            "inter_token_latency_seconds",
            "Between output tokens: a step of n of them is n gaps, each of its n-th part.",
            "model",
            buckets=ITL_BUCKETS_S,
            do="A long tail is a step that waited for a prompt: bound it by `itl_target_s`.",
        )
        self.tpot = group.histogram(
            "time_per_output_token_seconds",
            "Of a request, on average, per token after its first.",
            "model",
            buckets=ITL_BUCKETS_S,
            do="It grows with the batch: fewer requests at once, or another replica.",
        )
        self.queue_time = group.histogram(
            "request_queue_time_seconds",
            "Before it was begun: in the engine, or here, for an upstream's max_concurrency.",
            "model",
            buckets=TTFT_BUCKETS_S,
            do="Add a replica, raise `max_concurrency`, or move work to the batch lane.",
        )
        self._make_limit_metrics(group)
        self.open_calls = group.gauge(
            "open_calls",
            "Requests for a model under way.",
            do="It never falls to zero on its own under load; after traffic ends it has to.",
        )
        # What every request asks for: `labels` takes longer than to count.
        self.requests_of = lru_cache(MAX_CHILDREN)(self.requests.labels)
        self.tokens_of = lru_cache(MAX_CHILDREN)(self.tokens.labels)
        self.ttft_of = lru_cache(MAX_CHILDREN)(self.ttft.labels)
        self.itl_of = lru_cache(MAX_CHILDREN)(self.itl.labels)
        self.tpot_of = lru_cache(MAX_CHILDREN)(self.tpot.labels)
        self.queue_time_of = lru_cache(MAX_CHILDREN)(self.queue_time.labels)

    def _make_limit_metrics(self, group: MetricGroup) -> None:
        self.limit_refusals = group.counter(
            "limit_refusals",
            "Requests and tool calls that a limit refused, by whose it was (key, key_model, model, "
            "client, project, org) and what it counts.",
            *("scope", "kind"),
            do="By design, unless it is many customers at once: see "
            "`tollgate plans list`. `money`: a spending cap or a credit is used up.",
        )
        self.limit_slices = group.counter(
            "limit_slices",
            "Requests that have limits: admitted from slices that the worker holds, or why Redis "
            "was asked (few come: quiet; no slice yet, of a limit that changed, expired; little "
            "left of a limit or cap: low; too little in the slice: short), or could not be: away.",
            "reason",
            do="Under load most are `admitted`. low: limits are nearly used up. expired: workers "
            "or Redis are slow.",
        )
        self.slices_of = lru_cache(MAX_CHILDREN)(self.limit_slices.labels)

    def _make_slo_metrics(self) -> None:
        group = MetricGroup("Service level objectives", self.made)
        self.slo_requests = group.counter(
            "slo_requests",
            "Requests judged by their service level objective ([slo]): met; late_first_token, "
            "slow_tokens, failed. Goodput is the share of those that met it.",
            *("model", "lane", "outcome"),
            do="The outcome says where to look: the queue, the pace of tokens, or errors.",
        )
        self.slo_target = group.gauge(
            "slo_target_ratio",
            "The share of requests that is to meet its objective (`slo.target`).",
            do="A setting; alert rules compute the error budget of it.",
            mode="mostrecent",
        )
        self.slo_ttft, self.slo_tpot = (
            group.gauge(
                f"slo_{part}_seconds",
                f"The objective of a model's requests in a lane: {text}.",
                *("model", "lane"),
                do="A setting: `[slo]` and `slo` of a model.",
                mode="mostrecent",
            )
            for part, text in (("ttft", "its first token"), ("tpot", "each token after it"))
        )
        self.slo_requests_of = lru_cache(MAX_CHILDREN)(self.slo_requests.labels)

    def _make_engine_metrics(self) -> None:
        group = MetricGroup("Engines", self.made)
        self.engine_gauges = EngineGauges(group)
        self.cache_leases = group.counter(
            "cache_leases",
            "Leases on prefixes: granted, then kept; all other outcomes are refunded.",
            *("model", "outcome"),
            do="Many that are not kept: the KV cache is too small for what was promised.",
        )

    def _make_upstream_metrics(self) -> None:
        group = MetricGroup("Upstreams and parts", self.made)
        self.upstream_running, self.upstream_waiting = (
            group.gauge(f"upstream_requests_{state}", text, "model", "lane", do=do)
            for state, text, do in (
                (
                    "running",
                    "Requests that an upstream with a max_concurrency works on.",
                    "At the bound all the time: raise it with the vendor, or add a replica.",
                ),
                (
                    "waiting",
                    "Requests that wait here for such an upstream.",
                    "As above; the lane says who waits.",
                ),
            )
        )
        self.component_states = group.gauge(
            "components",
            "Workers by how they find each part that requests depend on (/v1/admin/health).",
            *("kind", "name", "state"),
            do="`tollgate status` says since when and the last error. `unauthorised`: its key.",
        )
        self.breakers_open = group.gauge(
            "breakers_open",
            "Circuit breakers that are open, by what they protect: an upstream (`MODEL/POSITION`), "
            "batch_lines of a model, an mcp server (one for each caller that it knows).",
            *("kind", "name"),
            do="It failed several times in a row and is left alone for a while; it closes by "
            "itself once a request gets through.",
        )
        self.upstream_disputes = group.counter(
            "upstream_disputes",
            "Answers of an upstream (model/position) that claim more than the request can have "
            "used.",
            "upstream",
            do="Ask the vendor; the house pays nothing of it (`tollgate usage`).",
        )
        self.upstream_disputed_tokens = group.counter(
            "upstream_disputed_tokens",
            "Tokens that upstreams claimed beyond that: input, output; billed to nobody.",
            *("upstream", "kind"),
            do="As above.",
        )

    def _make_money_metrics(self) -> None:
        group = MetricGroup("Usage and money", self.made)
        self.spend = group.counter(
            "spend_usd",
            "Rated usage that was booked in the ledger, in USD, by model; house usage too.",
            "model",
            do="For trends. Invoices come of the ledger, in exact numbers.",
        )
        self._make_spool_metrics(group)
        self.ledger_lag = group.histogram(
            "ledger_lag_seconds",
            "From the end of a request's use to its entry in the ledger: the oldest of each batch.",
            buckets=LAG_BUCKETS_S,
            do="Usually below a second. Higher: Postgres is slow, or caught up after an outage.",
        )
        self.usage_conflicts = group.gauge(
            "usage_conflicts",
            "Alarm: events that came again under their id with other content.",
            do="`tollgate reconcile`; two gateways may share one `home`.",
        )
        self.usage_refused = group.gauge(
            "usage_refused",
            "Alarm: events that Postgres refuses or that were damaged.",
            do="`tollgate spool list` shows them; accept or discard each.",
        )
        self.mail_attempts = group.counter(
            "mail_attempts",
            "Attempts to tell a person of an event by e-mail: delivered, failed (tried again), "
            "dead (given up).",
            "outcome",
            do="failed: see `[mail]` and what its server says (`tollgate logs --level warning`).",
        )
        self.webhook_attempts = group.counter(
            "webhook_attempts",
            "Attempts to deliver an event: delivered, failed (tried again), dead (given up).",
            "outcome",
            do="dead: the receiver was away for days; replay it (`/v1/admin/webhook_endpoints`).",
        )
        for outcome in DELIVERY_OUTCOMES:
            start_at_zero(self.mail_attempts, outcome)
            start_at_zero(self.webhook_attempts, outcome)

    def _make_spool_metrics(self, group: MetricGroup) -> None:
        self.spool_backlog = group.gauge(
            "spool_backlog_events",
            "Usage events on disk that Postgres does not have yet.",
            do="Growing: Postgres is away or slow. Nothing is lost while the disk has room.",
        )
        self.spool_lag = group.gauge(
            "spool_lag_seconds",
            "The age of the oldest usage event that Postgres does not have; 0: it has all.",
            do="Above a minute: `tollgate status`, then Postgres. Budgets lag as much.",
            mode="livemax",
        )
        self.spool_unsynced = group.gauge(
            "spool_unsynced_seconds",
            "The age of the oldest record of usage that is written and not synced; 0: all are.",
            do="Above 0.005 answers wait for the disk: it is slow, or others keep it busy.",
            mode="livemax",
        )
        self._spool_counters = tuple(
            group.counter(f"spool_{name}", text, do=do)
            for name, text, do in (
                ("writes", "Writes to spools.", "Over requests about one; long answers add some."),
                ("syncs", "Syncs of spools; requests share them.", "They load the disk."),
                ("bytes", "Bytes written to spools.", "Over requests about a thousand."),
            )
        )
        self._spool_counts = SpoolCounts(0, 0, 0)
        self.spool_free_bytes = group.gauge(
            "spool_free_bytes",
            "Room on the disk that usage is recorded on before Postgres has it.",
            do="Make room: with 256 KiB left no request is served.",
            mode="livemin",
        )
        self.spool_quarantined = group.gauge(  # each worker counts them all
            "spool_quarantined_records",
            "Alarm: damaged records of this host's spools that wait for a person.",
            do="`tollgate spool list` shows them; `tollgate spool accept` or `discard` each.",
            mode="livemax",
        )

    def _make_process_metrics(self) -> None:
        group = MetricGroup("Processes", self.made)
        self.tasks = group.gauge(
            "tasks",
            "Tasks of the event loops.",
            do="It follows the load; what only grows is a leak, please report it.",
        )
        self.access_lines_dropped = group.counter(
            "access_lines_dropped",
            "Lines of the access log that were not written: the disk is full, or nobody reads.",
            do="Free the disk of `HOME/logs`, or repair what reads stdout.",
        )
        self.spans_sent = group.counter(
            "spans_sent",
            "Spans of traces that the collector took.",
            do="None with traces on: look at the next.",
        )
        self.spans_lost = group.counter(
            "spans_lost",
            "Spans that were not sent: the collector is away or slow, and no more of them wait.",
            do="Look after the collector of `[traces]`, or send fewer; no request waits for it.",
        )
        self.request_rows_dropped = group.counter(
            "request_rows_dropped",
            "Requests, or texts of them, that the log of requests lost: Postgres was away.",
            do="The console shows fewer requests than there were; the books have all of them.",
        )
        self.build_info = group.gauge(
            "build_info",
            "The version that the workers run; always 1.",
            "version",
            do="More than one: a rolling update is under way, or stuck.",
            mode="mostrecent",
        )

    def _make_mcp_metrics(self) -> None:
        group = MetricGroup("MCP", self.made)
        self.mcp_calls = group.counter(
            "mcp_calls",
            "Tool calls that went out to MCP servers: done, asked (the client is to answer first), "
            "failed, left (nobody waited).",
            *("server", "outcome"),
            do="failed: `tollgate mcp doctor` says what its server answers.",
        )
        self.mcp_call_seconds = group.histogram(
            "mcp_call_seconds",
            "How long a tool call took at its server, until its result or its failure.",
            "server",
            buckets=TTFT_BUCKETS_S,
            do="The server's own time; `[mcp.loop]` bounds what a tool loop waits for.",
        )
        self.mcp_guard_findings = group.counter(
            "mcp_guard_findings",
            "What the guard stopped or marked: requests that it denied, by the reason; "
            "result_withheld (against its schema or too large), resource_hidden (the scanner "
            "flags it), tainted (its caller is asked from then on).",
            *("server", "finding"),
            do="not_approved, definition_refused: the server's offer changed, see `tollgate mcp "
            "diff`. Others: the audit log's entries `mcp.denied`.",
        )
        self.mcp_scan_texts = group.counter(
            "mcp_scan_texts",
            "Sentences of MCP offers that the gateway had embedded for itself: embedded, failed.",
            "outcome",
            do="failed: `mcp.scan_model` is away; offers are scanned by their words meanwhile.",
        )
        self.mcp_upstreams = group.gauge(
            "mcp_upstreams",
            "Who MCP servers are asked for (tenants or users, by worker), by what the server is to "
            "them: closed (asked as usual), resting (it failed), trying.",
            *("server", "state"),
            do="resting: the server is away for them; `tollgate mcp doctor` says why.",
        )
        self.mcp_approvals_waiting = group.gauge(
            "mcp_approvals_waiting",
            "Calls of an MCP server's tools that wait for a person to approve them, of all "
            "organizations; each host counts them all, every half minute.",
            "server",
            do="`tollgate mcp calls` or the console; one that nobody decides in its time "
            "is refused.",
            mode="mostrecent",
        )

    def engine_status(self, model: str, replica: str, status: ReplicaStatus) -> None:
        self.engine_gauges.show(model, replica, status)

    def spool_written(self, counts: SpoolCounts) -> None:
        for counter, before, now in zip(
            self._spool_counters, self._spool_counts, counts, strict=True
        ):
            counter.inc(now - before)
        self._spool_counts = counts

    def cache_leases_became(self, model: str, outcome: str, number: int) -> None:
        self.cache_leases.labels(self.label(model), outcome).inc(number)

    def waiting_rooms(self, model: str, rooms: Sequence[LaneCounts]) -> None:
        for lane in LANE_WEIGHTS:
            running = sum(room.num_served[lane] for room in rooms)
            waiting = sum(room.num_waiting[lane] for room in rooms)
            self.upstream_running.labels(model, lane).set(running)
            self.upstream_waiting.labels(model, lane).set(waiting)

    def show_objectives(self, slos: SloTable, models: Iterable[str]) -> None:
        """Show what requests are judged by."""
        self.slo_target.set(slos.target)
        for model in models:
            for lane in LANE_WEIGHTS:
                slo = slos.of(model, lane)
                self.slo_ttft.labels(model, lane).set(slo.ttft_s)
                self.slo_tpot.labels(model, lane).set(slo.tpot_s)

    def breakers(
        self,
        *,
        resting: Iterable[tuple[str, str]],
        batch_models: Iterable[str],
        mcp_servers: Iterable[str],
    ) -> None:
        """`resting`: kind and name of each upstream that is left alone; the others: for which a
        breaker is open."""
        counted = Counted(resting)
        counted.update(("batch_lines", self.label(model)) for model in batch_models)
        counted.update(("mcp", server) for server in mcp_servers)
        for each in counted.keys() | self._gone("breakers", frozenset(counted)):
            self.breakers_open.labels(*each).set(counted[each])

    def mcp_health(self, servers: Iterable[str], found: Iterable[tuple[str, str]]) -> None:
        """`servers`: those of the settings. `found`: a server and its state, of each upstream."""
        counted, named = Counted(found), frozenset(servers)
        for server in named - self._shown.get("servers", frozenset()):
            for finding in OFFER_FINDINGS:
                start_at_zero(self.mcp_guard_findings, server, finding)
        for server in named | self._gone("servers", named):
            for state in UPSTREAM_STATES:
                self.mcp_upstreams.labels(server, state).set(counted[server, state])

    def approvals_waiting(self, servers: Mapping[str, int]) -> None:
        """`servers`: how many calls of each wait, where any do."""
        named = self._shown.get("servers", frozenset()) | servers.keys()
        for server in named | self._gone("approvals", frozenset(named)):
            self.mcp_approvals_waiting.labels(server).set(servers.get(server, 0))

    def components(self, found: Iterable[tuple[str, str, str]]) -> None:
        """`found`: kind, name and state of each."""
        states = {(kind, name): state for kind, name, state in found}
        before, self._states = self._states, states
        for kind, name in states.keys() - before.keys():
            if kind == "upstream":
                start_at_zero(self.upstream_disputes, name)
        for kind, name in states.keys() | before.keys():
            state = states.get((kind, name))
            if before.get((kind, name)) == state:
                continue
            for each in COMPONENT_STATES[kind]:
                self.component_states.labels(kind, name, each).set(each == state)

    def zero_gone(self, *, engines: Iterable[tuple[str, str]], rooms: Iterable[str]) -> None:
        """Set the gauges of what is not served any more to zero: a file that processes share
        forgets none. `engines`: by model and replica; `rooms`: by model."""
        self.engine_gauges.zero(self._gone("engines", frozenset(engines)))
        for model in self._gone("rooms", frozenset(rooms)):
            self.waiting_rooms(model, ())

    def _gone(self, what: str, now: frozenset[T]) -> frozenset[T]:
        """Return what was there the last time and is not now."""
        before, self._shown[what] = self._shown.get(what, frozenset()), now
        return before - now

    def limit_refused(self, refusal: RefusedByLimit) -> None:
        self.limit_refusals.labels(refusal.scope, refusal.kind).inc()

    def slices_asked(self, reason: str) -> None:
        self.slices_of(reason).inc()

    def mcp_called(self, server: str, outcome: str, took_s: float | None) -> None:
        """Count a tool call that went out. `took_s`: None, where its begin is unknown."""
        self.mcp_calls.labels(server, outcome).inc()
        if took_s is not None:
            self.mcp_call_seconds.labels(server).observe(took_s)

    def mcp_guard_found(self, server: str, finding: str) -> None:
        known = finding if finding in GUARD_FINDINGS else OTHER_FINDING
        self.mcp_guard_findings.labels(server, known).inc()

    async def booked(self, events: Sequence[UsageEvent]) -> None:
        """Count what has just been booked in the ledger; what is told again is counted again."""
        if not events:
            return
        lag_s = time.time() - min(each.occurred_at for each in events)
        self.ledger_lag.labels().observe(max(0.0, lag_s))
        for model, pico in (await asyncio.to_thread(spent_by_model, events)).items():
            label = MCP_MODELS if model.startswith(f"{MCP_MODELS}/") else self.label(model)
            self.spend.labels(label).inc(pico / PICO_PER_USD)
        if self.tenants is not None:
            await asyncio.to_thread(self.tenants.booked, events)

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

    def render(self, accept: str = "") -> Exposition:
        """Write the metrics of all workers, in the format that an `Accept` header asks for. With
        many models it takes some milliseconds; from any thread."""
        media_type = negotiated(accept)
        measured = self.measured(with_natives=media_type == PROTOBUF)
        return Exposition(WRITERS[media_type](measured), media_type)

    def measured(self, *, with_natives: bool = False) -> Measurements:
        """Return the metrics of all workers; native buckets where they are asked for."""
        if self.shared_folder is None:
            own = (each for each in self.registry.collect() if each.type != "histogram")
            return Measurements([*own], self.own_histograms(with_natives=with_natives))
        records = records_of(contents_of(self.shared_folder))
        histograms = [
            each.family(records.get(each.name, ()), with_natives=with_natives)
            for each in self.made.histograms
        ]
        tenants = () if self.tenants is None else self.tenants.collect()
        return Measurements([*gather(self.shared_folder), *tenants], histograms)

    def own_histograms(self, *, with_natives: bool = False) -> list[HistogramFamily]:
        records = records_of((self.made.memory.content(),))
        return [
            each.family(records.get(each.name, ()), with_natives=with_natives)
            for each in self.made.histograms
        ]

    def token_counts(self) -> dict[str, Counted[str]]:
        """Return the tokens of each model by kind, as all workers have counted them, those that are
        gone too. It reads their files."""
        found: dict[str, Counted[str]] = {}
        for each in self.measured().metrics:
            if each.name == "tollgate_tokens":
                for sample in each.samples:
                    if sample.name.endswith("_total"):
                        of_model = found.setdefault(sample.labels["model"], Counted())
                        of_model[sample.labels["kind"]] += int(sample.value)
        return found

    def num_open_calls(self) -> int:
        """Return the requests for a model under way in all workers, as each of them has last
        observed it."""
        found = (each for each in self.measured().metrics if each.name == "tollgate_open_calls")
        return int(sum(sample.value for each in found for sample in each.samples))

    def close(self, pid: int) -> None:
        """Take this worker's live gauges out of the shared sum."""
        if self.shared_folder is not None:
            mark_process_dead(pid, path=str(self.shared_folder))


def start_at_zero(counter: Counter, *labels: str) -> None:
    """Show a count before its first event: `increase()` would not see a series begin with it."""
    counter.labels(*labels)


def spent_by_model(events: Iterable[UsageEvent]) -> Counted[str]:
    """Return the amounts of usage in pico-USD."""
    spent: Counted[str] = Counted()
    for event in events:
        if event.kind == "usage":
            amount = rate(event.quantities, event.attempt.prices).amount_pico
            spent[event.attempt.model] += amount
    return spent


class _OwnHistograms(Collector):
    """Shows the histograms of this process to its registry."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return map(to_metric, self._telemetry.own_histograms())
