"""Shows what engines tell in their status as gauges, by model and replica, and counts what became
of generations whose engine was lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from engine.protocol import ReplicaStatus
from gateway.telemetry.metric_group import MetricGroup

ENGINE_GAUGES = {
    "num_running": (
        "num_requests_running",
        "Requests in the batch.",
        "At `max_num_seqs` all the time, with a queue: the engine is at its bound.",
    ),
    "num_waiting": (
        "num_requests_waiting",
        "Requests queued.",
        "Growing: more comes than is computed. Add a replica, or move work to the batch lane.",
    ),
    "kv_cache_usage": (
        "kv_cache_usage_perc",
        "KV blocks held, 0 to 1.",
        "Near 1 with preemptions: a larger KV cache, shorter contexts or fewer requests at once.",
    ),
    "num_blocks": ("kv_cache_blocks", "KV blocks there are.", "A size, of 16 tokens each."),
    "num_cached_blocks": (
        "kv_cache_cached_blocks",
        "KV blocks whose content a later prompt may find, held by a request or not.",
        "All of them and few hits: prompts do not begin alike, or blocks are evicted too soon.",
    ),
    "num_leased_blocks": (
        "kv_cache_leased_blocks",
        "KV blocks that are kept for a time for who paid for it.",
        "They leave less to everybody else; `cache_lease_share` bounds them.",
    ),
    "prefix_cache_hit_tokens": (
        "prefix_cache_hit_tokens",
        "Prompt tokens found in the prefix cache since its start.",
        "Its rate over that of the next is the hit rate.",
    ),
    "prefix_cache_query_tokens": (
        "prefix_cache_query_tokens",
        "Prompt tokens looked up since the engine's start.",
        "Falling back to zero: the engine started anew.",
    ),
    "tier_hit_tokens": (
        "prefix_cache_disk_hit_tokens",
        "Prompt tokens of those found that were read from disk (`kv_disk`), since its start.",
        "Zero while the disk fills: computing is quicker than reading, or nothing comes again.",
    ),
    "host_hit_tokens": (
        "prefix_cache_host_hit_tokens",
        "Prompt tokens of those found that came from host memory (`kv_host_bytes`).",
        "Zero: what comes again is still in the KV cache, or was evicted from both.",
    ),
    "num_host_blocks": (
        "kv_host_blocks",
        "KV blocks in host memory (`kv_host_bytes`).",
        "All there may be, and few hits: it is too small for what comes again.",
    ),
    "num_tier_blocks": (
        "kv_disk_blocks",
        "KV blocks on disk (`kv_disk`).",
        "Falling to zero: the disk was full or broken, and the log says so.",
    ),
    "num_held_blocks": (
        "kv_held_blocks",
        "KV blocks kept for other engines of the model while they read them.",
        "At an eighth of all: reads take long, and may be cut short by evictions.",
    ),
    "num_expired_holds": (
        "kv_expired_holds",
        "Holds of blocks that other engines did not release, since the engine's start.",
        "Rising: engines die or hang while they read.",
    ),
    "fetched_tokens": (
        "prefix_cache_fetched_tokens",
        "Prompt tokens of those found that were read from other engines (`[fleet] fetch`), since "
        "its start.",
        "Zero with several replicas: requests meet their prefixes where they are, or computing "
        "is quicker.",
    ),
    "fetched_bytes": (
        "kv_fetched_bytes",
        "Bytes of KV read from other engines since its start.",
        "Its rate is what moves between engines.",
    ),
    "num_stale_fetches": (
        "kv_stale_fetches",
        "Reads from other engines that found a block given up amid them, since its start: nothing "
        "of it was used.",
        "Rising with the hits falling: the other engines' caches are too small.",
    ),
    "num_failed_fetches": (
        "kv_failed_fetches",
        "Reads from other engines that were away, refused or sent nonsense, since its start.",
        "Rising while none restarts: see the engine's log.",
    ),
    "num_preemptions": (
        "num_preemptions",
        "Preemptions since the engine's start.",
        "Each computes a prompt twice: the KV cache is too small for what runs at once.",
    ),
    "generated_tokens": (
        "generation_tokens",
        "Tokens generated since the engine's start.",
        "Its rate is the engine's throughput.",
    ),
    "num_draft_tokens": (
        "spec_decode_draft_tokens",
        "Guessed tokens verified since the engine's start.",
        "Zero with `speculative` set: nothing could be guessed.",
    ),
    "num_accepted_tokens": (
        "spec_decode_accepted_tokens",
        "Guessed tokens that were right, since then.",
        "Below a third of the guessed: guessing costs more than it brings.",
    ),
}
"""By the field of `ReplicaStatus`: the metric that shows it, its help text and what to do about it.
Every worker hears the same engine, so the most recent word is the right one."""
READ_GAUGES = {
    "read_s": (
        "kv_read_start_seconds",
        "Until the first tokens that an engine reads of another are there, as it has learnt.",
        "Above what a step takes: short beginnings are computed instead.",
    ),
    "read_token_s": (
        "kv_read_token_seconds",
        "Seconds that an engine takes to read the KV of a token from another, as it has learnt.",
        "Above what computing a token takes (`prompt_token_s` of `tollgate fleet status --json`): "
        "nothing is read.",
    ),
}
"""The same by the field of `PeerStatus`; zero of engines that read nothing of others."""
INDEX_GAUGES = (
    (
        "fleet_index_entries",
        "Spans of 128 tokens that some engine has cached, in the index by which requests are sent "
        "to one of a model's engines.",
        "A size; its bound is four million.",
    ),
    (
        "fleet_index_lag_seconds",
        "From an engine's change of its cache to its place in the index, at last.",
        "Above 0.2: the conductor has too little processor time.",
    ),
    (
        "fleet_index_silent_seconds",
        "Since the conductor was last heard of, which writes the index.",
        "Growing: it is away (`conductor.log`), and prefixes are found less often.",
    ),
)
"""The index of what engines have cached, which all workers read."""


ResumeOutcome = Literal["resumed", "drained", "exhausted", "no_replica", "left"]
GAP_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ResumeMetrics:
    def __init__(self, group: MetricGroup) -> None:
        self.count = group.counter(
            "resumes",
            "Generations whose engine was lost amid them: resumed by another one, or by the same "
            "one when it was back; drained: it was to be taken away, and another one went on; "
            "exhausted: lost too often; no_replica: none was there in time; left: the client was "
            "gone by then.",
            *("model", "outcome"),
            do="Each but `drained` is an engine that died or hung: see its log. no_replica: "
            "`replicas = 2`.",
        )
        self.gap = group.histogram(
            "resume_gap_seconds",
            "From the loss of a generation's engine to the first token that another one adds.",
            "model",
            buckets=GAP_BUCKETS_S,
            do="With another replica: the time to compute the prompt again; with none, to start "
            "an engine.",
        )


class EngineGauges:
    def __init__(self, group: MetricGroup) -> None:
        self.resumes = ResumeMetrics(group)
        self.gauges = {
            field: group.gauge(name, text, "model", "replica", do=do, mode="mostrecent")
            for field, (name, text, do) in ENGINE_GAUGES.items()
        }
        self._reads = {
            field: group.gauge(name, text, "model", "replica", do=do, mode="mostrecent")
            for field, (name, text, do) in READ_GAUGES.items()
        }
        self._index = [
            group.gauge(name, text, do=do, mode="mostrecent") for name, text, do in INDEX_GAUGES
        ]
        self._shows_index = False

    def show(self, model: str, replica: str, status: ReplicaStatus) -> None:
        for field, gauge in self.gauges.items():
            gauge.labels(model, replica).set(getattr(status, field))
        for field, gauge in self._reads.items():
            gauge.labels(model, replica).set(getattr(status.peer, field, 0.0))

    def show_index(self, state: tuple[int, float, float] | None) -> None:
        """Show the index's entries, lag and silence. None: there is none, or no more."""
        if state is not None or self._shows_index:
            self._shows_index = state is not None
            for gauge, value in zip(self._index, state or (0, 0.0, 0.0), strict=True):
                gauge.set(value)

    def zero(self, gone: Iterable[tuple[str, str]]) -> None:
        """Set what was told of replicas that are gone, by model and name, to zero."""
        for model, replica in gone:
            for gauge in (*self.gauges.values(), *self._reads.values()):
                gauge.labels(model, replica).set(0)
