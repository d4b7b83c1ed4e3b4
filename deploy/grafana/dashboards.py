"""Writes the Grafana dashboards beside it, one JSON file each, and the rules as a PrometheusRule.

    python deploy/grafana/dashboards.py      (make fields)

A panel is a line here: a title, its queries with their legends, and a unit. `$model` and `$server`
are chosen above a dashboard. Queries name metrics of docs/metrics.md and recordings of
deploy/prometheus/tollgate-rules.yml; tests compare both and ask a live Prometheus.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from panels import Dashboard, Panel, p50_p99, quantile, rate, to_json

FOLDER = Path(__file__).parent
PROMETHEUS = FOLDER.parent / "prometheus"
MODEL = 'model=~"$model"'


def of_model(metric: str) -> str:
    """Sum what the replicas of each model have, each counted once by whoever was scraped."""
    return f"sum by (model) (max by (model, replica) ({metric}{{{MODEL}}}))"


SERVER = 'server=~"$server"'
MODELS = ("model", "tollgate_slo_ttft_seconds")
SERVERS = ("server", "tollgate_mcp_upstreams")
GOODPUT = (
    f'sum by (%s) (rate(tollgate_slo_requests_total{{outcome="met", {MODEL}}}[$__rate_interval]))'
    f" / sum by (%s) (rate(tollgate_slo_requests_total{{{MODEL}}}[$__rate_interval]))"
)
BUDGET_LEFT = (
    "1 - (sum by (model, lane) "
    f'(increase(tollgate_slo_requests_total{{outcome!="met", {MODEL}}}[$__range]))'
    f" / sum by (model, lane) (increase(tollgate_slo_requests_total{{{MODEL}}}[$__range])))"
    " / on () group_left () (1 - max(tollgate_slo_target_ratio))"
)
CACHED = rate("tollgate_tokens_total", "model", where=f'kind="cache_read", {MODEL}')
CACHED_SHARE = f"{CACHED} / " + rate(
    "tollgate_tokens_total", "model", where=f'kind!="output", {MODEL}'
)
MISSED = rate("tollgate_slo_requests_total", "lane, outcome", where=f'outcome!="met", {MODEL}')
TTFT_SLO = f"max by (model, lane) (tollgate_slo_ttft_seconds{{{MODEL}}})"
TPOT_SLO = f"max by (model, lane) (tollgate_slo_tpot_seconds{{{MODEL}}})"
HITS = rate("tollgate_prefix_cache_hit_tokens", "model", where=MODEL)
LOOKUPS = rate("tollgate_prefix_cache_query_tokens", "model", where=MODEL)
CACHED_BLOCKS = f"tollgate_kv_cache_cached_blocks{{{MODEL}}} / tollgate_kv_cache_blocks"
LEASED_BLOCKS = f"tollgate_kv_cache_leased_blocks{{{MODEL}}} / tollgate_kv_cache_blocks"
DRAFTED = f"sum by (model) (tollgate_spec_decode_draft_tokens{{{MODEL}}})"
RIGHT = f"sum by (model) (tollgate_spec_decode_accepted_tokens{{{MODEL}}})"
SPENT_ON_CALLS = 'sum(rate(tollgate_spend_usd_total{model="mcp"}[$__rate_interval]))'
NEEDS_TENANTS = "By id, where `[metrics] tenants` is set; `-`: all beyond the first thousand."
NOT_SERVED = rate(
    "tollgate_tenant_requests_total", "org, outcome", where='outcome=~"limited|failed"'
)
DISPUTED = "sum(rate(tollgate_upstream_disputed_tokens_total[$__rate_interval]))"

SLO = Dashboard(
    "tollgate-slo",
    "Tollgate: SLO and goodput",
    [
        Panel(
            "Goodput now", [("{{lane}}", GOODPUT % ("lane", "lane"))], "percentunit", is_stat=True
        ),
        Panel(
            "Error budget left in this range",
            [("{{model}} {{lane}}", BUDGET_LEFT)],
            "percentunit",
            "Below zero: more requests missed their objective than the target allows.",
            is_stat=True,
        ),
        Panel(
            "Goodput by model and lane",
            [
                ("{{model}} {{lane}}", GOODPUT % ("model, lane", "model, lane")),
                ("target", "max(tollgate_slo_target_ratio)"),
            ],
            "percentunit",
            "The share of requests that met time to first token and time per output token.",
        ),
        Panel(
            "What was missed",
            [
                (
                    "{{lane}} {{outcome}}",
                    MISSED,
                )
            ],
            "reqps",
        ),
        Panel(
            "Burn rate (1: the budget lasts exactly)",
            [
                (
                    "{{model}} {{lane}} 1 h",
                    "tollgate:slo_miss:ratio_rate1h / on () group_left () tollgate:slo_budget",
                ),
                (
                    "{{model}} {{lane}} 6 h",
                    "tollgate:slo_miss:ratio_rate6h / on () group_left () tollgate:slo_budget",
                ),
            ],
            text="14.4 over an hour wakes somebody, 6 over six hours is a ticket.",
        ),
        Panel(
            "Time to first token",
            [
                *p50_p99("tollgate_time_to_first_token_seconds", "model", where=MODEL),
                ("{{model}} {{lane}} objective", TTFT_SLO),
            ],
            "s",
        ),
        Panel(
            "Time per output token",
            [
                *p50_p99("tollgate_time_per_output_token_seconds", "model", where=MODEL),
                ("{{model}} {{lane}} objective", TPOT_SLO),
            ],
            "s",
        ),
        Panel(
            "Queue time",
            p50_p99("tollgate_request_queue_time_seconds", "model", where=MODEL),
            "s",
        ),
    ],
    [MODELS],
)
ENGINE = Dashboard(
    "tollgate-engine",
    "Tollgate: engines",
    [
        Panel(
            "Requests in the batch and queued",
            [
                ("{{model}} running", of_model("tollgate_num_requests_running")),
                ("{{model}} waiting", of_model("tollgate_num_requests_waiting")),
            ],
        ),
        Panel(
            "KV cache held",
            [("{{model}}", f"max by (model) (tollgate_kv_cache_usage_perc{{{MODEL}}})")],
            "percentunit",
        ),
        Panel(
            "Prefix cache hit rate",
            [
                (
                    "{{model}}",
                    f"{HITS} / {LOOKUPS}",
                )
            ],
            "percentunit",
        ),
        Panel(
            "Tokens generated",
            [("{{model}}", rate("tollgate_generation_tokens", "model", where=MODEL))],
            "ops",
        ),
        Panel(
            "Between two tokens",
            p50_p99("tollgate_inter_token_latency_seconds", "model", where=MODEL),
            "s",
        ),
        Panel(
            "Preemptions",
            [("{{model}}", rate("tollgate_num_preemptions", "model", where=MODEL))],
            "ops",
        ),
        Panel(
            "Cache leases by outcome",
            [("{{outcome}}", f"{rate('tollgate_cache_leases_total', 'outcome')} or vector(0)")],
            "ops",
            "Granted, then kept; all other outcomes are refunded.",
        ),
        Panel(
            "KV blocks cached and leased",
            [
                ("{{model}} cached", f"max by (model) ({CACHED_BLOCKS})"),
                ("{{model}} leased", f"max by (model) ({LEASED_BLOCKS})"),
            ],
            "percentunit",
            "Of all blocks; those that leases keep are among the cached ones.",
        ),
        Panel(
            "Guessed tokens that were right",
            [
                (
                    "{{model}}",
                    f"{RIGHT} / ({DRAFTED} > 0 or {DRAFTED} + 1)",
                )
            ],
            "percentunit",
            "Of all since the engine's start; 0 where nothing is guessed.",
        ),
    ],
    [MODELS],
)
FLEET = Dashboard(
    "tollgate-fleet",
    "Tollgate: fleet",
    [
        Panel(
            "Choices among engines by reason",
            [("{{reason}}", rate("tollgate_fleet_routes_total", "reason", where=MODEL))],
            "reqps",
        ),
        Panel(
            "Attempts on engines of other cells",
            [
                (
                    "{{model}} {{cell}}",
                    f"{rate('tollgate_cell_attempts_total', 'model, cell', where=MODEL)}"
                    " or vector(0)",
                )
            ],
            "ops",
            "The own cell has no engine up, would be late, or lost the one that was asked.",
        ),
        Panel(
            "How far first tokens were from their prediction",
            p50_p99("tollgate_fleet_prediction_error_seconds", "model", where=MODEL),
            "s",
        ),
        Panel(
            "Age of statuses at a choice",
            p50_p99("tollgate_fleet_status_age_seconds", "model", where=MODEL),
            "s",
            "At most 0.1 s while engines work, a second while they do not.",
        ),
        Panel(
            "Early rejections",
            [
                ("{{lane}}", rate("tollgate_early_rejections_total", "lane", where=MODEL)),
                (
                    "{{lane}} tokens",
                    rate("tollgate_early_rejections_tokens_total", "lane", where=MODEL),
                ),
            ],
            "ops",
        ),
        Panel(
            "Engines by state",
            [
                (
                    "{{model}} {{state}}",
                    f"sum by (model, state) (tollgate_pool_replicas{{{MODEL}}})",
                )
            ],
        ),
        Panel(
            "Engines that the planner wants",
            [("{{model}}", f"sum by (model) (tollgate_planner_wanted{{{MODEL}}})")],
            text="Of models with a range of engines; `tollgate fleet plan` says why.",
        ),
        Panel(
            "Organizations on the new version",
            [("{{model}}", f"max by (model) (tollgate_rollout_share{{{MODEL}}})")],
            "percentunit",
            "Of rollouts under way; `tollgate models rollout status` says what was seen.",
        ),
        Panel(
            "Requests as the planner expects them",
            [
                (
                    "{{model}}",
                    f"sum by (model) (tollgate_planner_forecast_requests_per_second{{{MODEL}}})",
                )
            ],
            "reqps",
            "When an engine that is started now would serve.",
        ),
        Panel(
            "How long the last engine took to start",
            [("{{model}}", f"max by (model) (tollgate_planner_start_seconds{{{MODEL}}})")],
            "s",
        ),
        Panel(
            "Generations that lost their engine",
            [("{{outcome}}", rate("tollgate_resumes_total", "outcome", where=MODEL))],
            "ops",
        ),
        Panel(
            "Until they went on",
            p50_p99("tollgate_resume_gap_seconds", "model", where=MODEL),
            "s",
        ),
        Panel(
            "From prefill to decode engines",
            p50_p99("tollgate_handover_seconds", "model", where=MODEL),
            "s",
            "From the first token to the next one, of another engine.",
        ),
        Panel(
            "First tokens asked of a second engine",
            [("{{outcome}}", rate("tollgate_hedges_total", "outcome", where=MODEL))],
            "ops",
            "Where the first engine was late beside what was predicted.",
        ),
        Panel(
            "Requests that waited and were to move to another engine",
            [("{{outcome}}", rate("tollgate_fleet_moves_total", "outcome", where=MODEL))],
            "ops",
            "Where another engine was predicted to be much sooner than what was left of the wait.",
        ),
        Panel(
            "Spans of prompts in the index",
            [("spans", "max(tollgate_fleet_index_entries)")],
        ),
        Panel(
            "How old the index is",
            [
                ("lag", "max(tollgate_fleet_index_lag_seconds)"),
                ("silent", "max(tollgate_fleet_index_silent_seconds)"),
            ],
            "s",
        ),
        Panel(
            "KV blocks in host memory and on disk",
            [
                ("{{model}} host", of_model("tollgate_kv_host_blocks")),
                ("{{model}} disk", of_model("tollgate_kv_disk_blocks")),
            ],
        ),
        Panel(
            "Prompt tokens read from host memory and from disk",
            [
                (
                    "{{model}} host",
                    rate("tollgate_prefix_cache_host_hit_tokens", "model", where=MODEL),
                ),
                (
                    "{{model}} disk",
                    rate("tollgate_prefix_cache_disk_hit_tokens", "model", where=MODEL),
                ),
            ],
            "ops",
        ),
        Panel(
            "Prompt tokens read from other engines",
            [
                (
                    "{{model}}",
                    rate("tollgate_prefix_cache_fetched_tokens", "model", where=MODEL),
                )
            ],
            "ops",
        ),
        Panel(
            "KV read from other engines",
            [("{{model}}", rate("tollgate_kv_fetched_bytes", "model", where=MODEL))],
            "Bps",
        ),
        Panel(
            "Seconds to read KV from another engine",
            [
                ("{{model}} first", f"max by (model) (tollgate_kv_read_start_seconds{{{MODEL}}})"),
                ("{{model}} token", f"max by (model) (tollgate_kv_read_token_seconds{{{MODEL}}})"),
            ],
            "s",
            "As engines have learnt: a beginning is read where that is quicker than computing it.",
        ),
        Panel("KV kept for other engines", [("{{model}}", of_model("tollgate_kv_held_blocks"))]),
        Panel(
            "Reads from other engines that brought less",
            [
                ("{{model}} given up", rate("tollgate_kv_stale_fetches", "model", where=MODEL)),
                ("{{model}} failed", rate("tollgate_kv_failed_fetches", "model", where=MODEL)),
                ("{{model}} not ended", rate("tollgate_kv_expired_holds", "model", where=MODEL)),
            ],
            "ops",
        ),
    ],
    [MODELS],
)
GATEWAY = Dashboard(
    "tollgate-gateway",
    "Tollgate: gateway",
    [
        Panel(
            "Requests by status",
            [("{{status}}", rate("tollgate_requests_total", "status"))],
            "reqps",
        ),
        Panel(
            "Requests by route", [("{{route}}", rate("tollgate_requests_total", "route"))], "reqps"
        ),
        Panel(
            "Requests by model",
            [("{{model}}", rate("tollgate_requests_total", "model", where=MODEL))],
            "reqps",
        ),
        Panel("Requests under way", [("requests", "sum(tollgate_open_calls)")]),
        Panel(
            "Parts that are not as they should be",
            [
                (
                    "{{kind}} {{name}} {{state}}",
                    'sum by (kind, name, state) (tollgate_components{state!~"ok|unknown"})',
                )
            ],
            text="Workers that find a part in this state; 0 is what you want to see.",
        ),
        Panel("Open circuit breakers", [("all", "sum(tollgate_breakers_open) or vector(0)")]),
        Panel(
            "Requests at upstreams with a max_concurrency",
            [
                (
                    "{{model}} running",
                    f"sum by (model) (tollgate_upstream_requests_running{{{MODEL}}})",
                ),
                (
                    "{{model}} waiting",
                    f"sum by (model) (tollgate_upstream_requests_waiting{{{MODEL}}})",
                ),
            ],
        ),
        Panel(
            "Spans sent",
            [("spans", "sum(rate(tollgate_spans_sent_total[$__rate_interval]))")],
            "ops",
            "0 without `[traces]`.",
        ),
        Panel(
            "Telemetry that was lost",
            [
                ("log lines", "sum(rate(tollgate_access_lines_dropped_total[$__rate_interval]))"),
                ("spans", "sum(rate(tollgate_spans_lost_total[$__rate_interval]))"),
                (
                    "request rows",
                    "sum(rate(tollgate_request_rows_dropped_total[$__rate_interval]))",
                ),
            ],
            "ops",
        ),
        Panel("Tasks of the event loops", [("tasks", "sum(tollgate_tasks)")]),
        Panel(
            "Versions", [("{{version}}", "max by (version) (tollgate_build_info)")], is_stat=True
        ),
    ],
    [MODELS],
)
MONEY = Dashboard(
    "tollgate-money",
    "Tollgate: tenants and money",
    [
        Panel(
            "Spend an hour",
            [("{{model}}", f"3600 * {rate('tollgate_spend_usd_total', 'model', where=MODEL)}")],
            "currencyUSD",
            "As booked, for trends.",
        ),
        Panel(
            "Spend an hour of the organizations that spend most",
            [("{{org}}", f"topk(10, 3600 * {rate('tollgate_tenant_spend_usd_total', 'org')})")],
            "currencyUSD",
            NEEDS_TENANTS,
        ),
        Panel(
            "Requests of the organizations that ask most",
            [("{{org}}", f"topk(10, {rate('tollgate_tenant_requests_total', 'org')})")],
            "reqps",
            NEEDS_TENANTS,
        ),
        Panel(
            "Tokens of the organizations that use most",
            [("{{org}}", f"topk(10, {rate('tollgate_tenant_tokens_total', 'org')})")],
            "ops",
            NEEDS_TENANTS,
        ),
        Panel(
            "Organizations whose requests are limited or fail",
            [
                (
                    "{{org}} {{outcome}}",
                    f"topk(10, {NOT_SERVED})",
                )
            ],
            "reqps",
            "limited: 402 and 429, failed: 5xx. " + NEEDS_TENANTS,
        ),
        Panel(
            "Tokens by kind",
            [("{{kind}}", rate("tollgate_tokens_total", "kind", where=MODEL))],
            "ops",
        ),
        Panel(
            "Share of input from caches",
            [
                (
                    "{{model}}",
                    CACHED_SHARE,
                )
            ],
            "percentunit",
        ),
        Panel(
            "Refused by limits",
            [
                (
                    "{{scope}} {{kind}}",
                    f"{rate('tollgate_limit_refusals_total', 'scope, kind')} or vector(0)",
                )
            ],
            "reqps",
            "Whose limit, and what it counts; money: a cap or a credit is used up.",
        ),
        Panel(
            "Limits asked of a slice, or of Redis",
            [("{{reason}}", f"{rate('tollgate_limit_slices_total', 'reason')} or vector(0)")],
            "reqps",
            "admitted: from a slice that the worker holds; every other reason asks Redis.",
        ),
        Panel(
            "Shares of cells",
            [("{{event}}", f"{rate('tollgate_cell_rounds_total', 'event')} or vector(0)")],
            "ops",
            "not_read: a cell is cut off from Postgres, and lets pass an equal part of each limit.",
        ),
        Panel(
            "Usage that Postgres does not have", [("events", "sum(tollgate_spool_backlog_events)")]
        ),
        Panel(
            "Lag of the books",
            [
                ("oldest in the spool", "max(tollgate_spool_lag_seconds)"),
                ("into the ledger p99", quantile(0.99, "tollgate_ledger_lag_seconds", "")),
            ],
            "s",
        ),
        Panel(
            "Usage that is not synced",
            [("oldest", "max(tollgate_spool_unsynced_seconds)")],
            "s",
            "Above 0.005 answers wait for the disk.",
        ),
        Panel(
            "Writes of usage to disk",
            [
                ("writes", "sum(rate(tollgate_spool_writes_total[$__rate_interval]))"),
                ("syncs", "sum(rate(tollgate_spool_syncs_total[$__rate_interval]))"),
                ("kB", "sum(rate(tollgate_spool_bytes_total[$__rate_interval])) / 1000"),
            ],
            "ops",
        ),
        Panel("Room for usage on disk", [("free", "min(tollgate_spool_free_bytes)")], "bytes"),
        Panel(
            "Records that wait for a person",
            [
                ("conflicts", "sum(tollgate_usage_conflicts)"),
                ("refused", "sum(tollgate_usage_refused)"),
                ("quarantined", "max(tollgate_spool_quarantined_records)"),
            ],
        ),
        Panel(
            "Tokens that upstreams claim and nobody pays",
            [
                (
                    "all",
                    f"{DISPUTED} or vector(0)",
                )
            ],
            "ops",
        ),
        Panel(
            "Webhooks and e-mails",
            [
                (
                    "webhooks {{outcome}}",
                    f"{rate('tollgate_webhook_attempts_total', 'outcome')} or vector(0)",
                ),
                (
                    "e-mails {{outcome}}",
                    f"{rate('tollgate_mail_attempts_total', 'outcome')} or vector(0)",
                ),
            ],
            "ops",
        ),
    ],
    [MODELS],
)
MCP = Dashboard(
    "tollgate-mcp",
    "Tollgate: MCP",
    [
        Panel(
            "Calls by outcome",
            [
                (
                    "{{server}} {{outcome}}",
                    rate("tollgate_mcp_calls_total", "server, outcome", where=SERVER),
                )
            ],
            "ops",
        ),
        Panel(
            "Time at the server", p50_p99("tollgate_mcp_call_seconds", "server", where=SERVER), "s"
        ),
        Panel(
            "Stopped by the guard",
            [
                (
                    "{{server}} {{finding}}",
                    rate("tollgate_mcp_guard_findings_total", "server, finding", where=SERVER),
                )
            ],
            "ops",
            "not_approved: the offer changed; approval_required: a person is asked.",
        ),
        Panel(
            "Calls that wait for a person",
            [("{{server}}", f"max by (server) (tollgate_mcp_approvals_waiting{{{SERVER}}})")],
            text="Of all organizations; the console and `tollgate mcp calls` decide them.",
        ),
        Panel(
            "State of servers, by whom they are asked for",
            [
                (
                    "{{server}} {{state}}",
                    f"sum by (server, state) (tollgate_mcp_upstreams{{{SERVER}}})",
                )
            ],
        ),
        Panel(
            "Spend on calls an hour",
            [
                (
                    "mcp",
                    f"3600 * {SPENT_ON_CALLS} or vector(0)",
                )
            ],
            "currencyUSD",
        ),
        Panel(
            "Sentences of offers that were compared",
            [("{{outcome}}", f"{rate('tollgate_mcp_scan_texts_total', 'outcome')} or vector(0)")],
            "ops",
        ),
    ],
    [SERVERS],
)
DASHBOARDS = (SLO, ENGINE, FLEET, GATEWAY, MONEY, MCP)


RULE_HEAD = """\
# tollgate-rules.yml for the Prometheus operator (make fields).
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: tollgate
  labels:
    app.kubernetes.io/name: tollgate
spec:
"""


def to_prometheus_rule(rules: str) -> str:
    """Return a file of rules as the Prometheus operator takes it."""
    return RULE_HEAD + textwrap.indent(rules[rules.index("groups:") :], "  ")


def main() -> None:
    for each in DASHBOARDS:
        (FOLDER / f"{each.uid}.json").write_text(to_json(each) + "\n")
    rules = (PROMETHEUS / "tollgate-rules.yml").read_text()
    (PROMETHEUS / "prometheus-rule.yaml").write_text(to_prometheus_rule(rules))


if __name__ == "__main__":
    main()
