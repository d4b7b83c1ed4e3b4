"""The tables of the request log, as their migration makes them.

`request_log` has a partition for each day (UTC) and a row for each request for a model: who asked,
what became of it, how long it took, what it used and what that cost when it was answered. Never a
prompt, never an address. `requests_hourly` and `requests_daily` are its sums. `request_content` has
the same partitions, and texts, sealed, of projects that want them stored. Tokens and money here are
what the worker counted as it answered; the ledger has what is billed.
"""

from __future__ import annotations

from functools import partial

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSON

from billing.tables import count_columns, moment_columns, text_columns

metadata = sa.MetaData()
_real = partial(sa.Column, nullable=False)

TOKENS = (
    *("uncached_tokens", "cached_tokens", "written_tokens"),
    *("output_tokens", "reasoning_tokens"),
)
"""By kind. `output_tokens` has those of reasoning in it, `uncached_tokens` those of embeddings."""

request_log = sa.Table(
    "request_log",
    metadata,
    *text_columns("org", primary_key=True),
    *moment_columns("at", primary_key=True),
    sa.Column("id", sa.Uuid, primary_key=True),
    *text_columns("project", "key", "model", "lane", "route"),
    _real("status", sa.SmallInteger),
    sa.Column("is_good", sa.Boolean),
    *count_columns("duration_us"),
    *count_columns("ttft_us", "tpot_us", "queue_us", nullable=True),
    *(_real(name, sa.Integer) for name in TOKENS),
    *count_columns("cost_pico"),
    _real("trace", sa.Uuid),
    sa.Column("stages", JSON),
    *moment_columns("landed_at"),
    *text_columns("cache_cause", nullable=True),
    sa.Column("cache_position", sa.Integer),
    *text_columns("batch", nullable=True),
    sa.Column("tags", JSON),
    *count_columns("itl_p50_us", "itl_p99_us", nullable=True),
    *text_columns("error_code", nullable=True),
    sa.Column("model_version", sa.Integer),
)

request_content = sa.Table(
    "request_content",
    metadata,
    *text_columns("org", primary_key=True),
    *moment_columns("at", primary_key=True),
    sa.Column("id", sa.Uuid, primary_key=True),
    *text_columns("project"),
    _real("content", sa.LargeBinary),
    *text_columns("secret_id"),
)
"""The texts of requests of projects that store them, packed and sealed (`content_log`)."""

OUTCOMES = {
    "num_refused": "status BETWEEN 400 AND 498 AND status <> 429",
    "num_limited": "status = 429",
    "num_failed": "status >= 500",
    "num_left": "status = 499",
    "num_rated": "is_good IS NOT NULL",
    "num_good": "is_good",
}
"""The requests that are counted apart, by SQL that tells one. `num_rated`: those that an SLO is
for, of which `num_good` met it."""
COUNTS = ("num_requests", *OUTCOMES, *TOKENS, "duration_us", "queue_us")
LATENCIES = ("ttft", "tpot")
"""Those that a request has one of, in a column `ttft_us`."""
HISTOGRAMS = (*LATENCIES, "itl")
"""`itl`: of the gaps between all tokens (`telemetry.latency_counts`)."""
GROUPED = ("project", "key", "model", "lane")


def _rollup(name: str, unit: str) -> sa.Table:
    """Define a table of sums, some of which are histograms (`request_log.histograms`)."""
    return sa.Table(
        name,
        metadata,
        *text_columns("org", primary_key=True),
        *moment_columns(unit, primary_key=True),
        *text_columns(*GROUPED, primary_key=True),
        *count_columns(*COUNTS),
        *(_real(each, sa.Numeric) for each in ("cost_pico", *HISTOGRAMS)),
    )


requests_hourly = _rollup("requests_hourly", "hour")
requests_daily = _rollup("requests_daily", "day")
