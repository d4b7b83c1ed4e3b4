"""Counts how requests find their engines: why each was chosen, how predictions turned out, and who
was refused for coming too late; how far rollouts are; and how cells divide limits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

from prometheus_client import Counter

from engine.protocol import Lane
from gateway.telemetry.metric_group import MetricGroup
from gateway.telemetry.pool_gauges import PoolGauges

HedgeOutcome = Literal["won", "lost", "failed", "withheld"]
MoveOutcome = Literal["moved", "begun", "failed"]
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
MAX_CHILDREN = 1024
"""How many label combinations of one metric are cached."""


class FleetMetrics:
    def __init__(self, group: MetricGroup) -> None:
        self._fleet_routes = group.counter(
            "fleet_routes",
            "Requests of models with several engines by why theirs was chosen: cached (the "
            "soonest, with more of the prompt cached than another), least_work (the soonest), "
            "spread (another is as soon, where more is held up or more was done lately), key (the "
            "client's cache key leads there), split (one engine computes the "
            "prompt, another one goes on), cell_down and cell_late (an engine that another cell "
            "lends: the own cell has none up, or would be late).",
            *("model", "reason"),
            do="Few `cached` with prompts that repeat: the caches are too small, or the index is "
            "away. `tollgate requests show` says what was predicted of each replica.",
        )
        prediction_errors = group.histogram(
            "fleet_prediction_error_seconds",
            "How far the time to a first token was from what was predicted of the engine.",
            "model",
            buckets=SECONDS,
            do="Beside the time to the first token it should be small; else early rejections are "
            "wrong: give deadlines and objectives more room.",
        )
        status_ages = group.histogram(
            "fleet_status_age_seconds",
            "The age of the oldest status that a choice among engines went by.",
            "model",
            buckets=SECONDS,
            do="Above 0.1 while engines work: a step takes longer, or the worker is held up. An "
            "idle engine says something once a second.",
        )
        self.handovers = group.histogram(
            "handover_seconds",
            "From a first token, where its prompt was computed, to the next one of another engine.",
            "model",
            buckets=SECONDS,
            do="Above what a few tokens take: the KV is read slowly or not at all, see "
            "`tollgate_kv_fetched_bytes`, or prompts are computed where others decode.",
        )
        self._rejections = group.counter(
            "early_rejections",
            "Requests refused as their first token would have come too late on every replica.",
            *("model", "lane"),
            do="Add replicas, or promise less: `[deadlines]` and `ttft_per_prefill` of `[slo]`.",
        )
        self._rejected_tokens = group.counter(
            "early_rejections_tokens",
            "The tokens of their prompts.",
            *("model", "lane"),
            do="A larger share of all tokens than of all requests: the long ones are refused; "
            "raise `ttft_per_prefill`.",
        )
        self._make_rollout_metrics(group)
        self._make_retry_metrics(group)
        self.pools = PoolGauges(group)
        self._make_cell_metrics(group)
        self.routes_of = lru_cache(MAX_CHILDREN)(self._route_counter)
        self.prediction_errors_of = lru_cache(MAX_CHILDREN)(prediction_errors.labels)
        self.status_ages_of = lru_cache(MAX_CHILDREN)(status_ages.labels)

    def _route_counter(self, model: str, reason: str) -> Counter:
        """Make the counter of a model's routes for a reason. Its requests have engines among which
        they may move: there is a count of that from now on, which is 0."""
        self.moves.labels(model, "moved")
        return self._fleet_routes.labels(model, reason)

    def _make_rollout_metrics(self, group: MetricGroup) -> None:
        self._rollout_shares = group.gauge(
            "rollout_share",
            "The share of organizations, 0 to 1, that a rollout under way gives the new version of "
            "a model.",
            "model",
            do="Zero amid a rollout: the version was worse and is taken back, see "
            "`tollgate models rollout status`.",
            mode="mostrecent",
        )
        self._shown_shares: Mapping[str, float] = {}

    def _make_retry_metrics(self, group: MetricGroup) -> None:
        self.hedges = group.counter(
            "hedges",
            "Requests whose first token was late beside what was predicted: won (another replica "
            "was asked and spoke first), lost (it was asked and spoke later), failed (it was asked "
            "and did not take it), withheld (none was free, or as many as may be were hedged).",
            *("model", "outcome"),
            do="won: an engine hangs or is slower than it says, see `tollgate fleet status`. Many "
            "withheld: all are busy; add replicas.",
        )
        self.moves = group.counter(
            "fleet_moves",
            "Requests that waited at an engine, and for which another one was predicted to be much "
            "sooner: moved (it went there and had its first token), begun (its engine had begun it "
            "by then, so it stayed), failed (the other one did not take it).",
            *("model", "outcome"),
            do="Some `moved` when an engine joins or comes back is as it should be. All the time: "
            "engines are slower than they say, see `tollgate_fleet_prediction_error_seconds`.",
        )

    def _make_cell_metrics(self, group: MetricGroup) -> None:
        self.cell_attempts = group.counter(
            "cell_attempts",
            "Attempts of requests on engines that another cell lends ([[cell.peer]]), by that "
            "cell: those with the reasons cell_down and cell_late in `tollgate_fleet_routes`, and "
            "those whose engine in the own cell was lost.",
            *("model", "cell"),
            do="The own cell has no engine of the model up, or too few: `tollgate fleet status` "
            "and `tollgate fleet explain` say which.",
        )
        self._cell_rounds = group.counter(
            "cell_rounds",
            "Rounds in which a worker read from Postgres which part of each limit its cell has "
            "([cell]): read, or not_read; and decisions that it made on shares: moved, or lost to "
            "another gateway that was before it.",
            "event",
            do="not_read for longer than some seconds: Postgres is away from this cell, which "
            "lets pass an equal part of each limit meanwhile.",
        )

    def refused_early(self, model: str, lane: Lane, num_tokens: int) -> None:
        """Count a request that came too late. `num_tokens`: of its prompt."""
        self._rejections.labels(model, lane).inc()
        self._rejected_tokens.labels(model, lane).inc(num_tokens)

    def show_rollouts(self, shares: Mapping[str, float]) -> None:
        """Show the share of each model's rollout, and zero of those that have ended."""
        for model in self._shown_shares.keys() | shares.keys():
            self._rollout_shares.labels(model).set(shares.get(model, 0.0))
        self._shown_shares = shares

    def cell_event(self, event: str) -> None:
        self._cell_rounds.labels(event).inc()
