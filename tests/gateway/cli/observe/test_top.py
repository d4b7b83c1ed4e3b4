"""Rates of each model between two looks at the metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.cli.observe.top import origin_of_metrics, rates, sample_of
from gateway.cli.shared.target import GatewayTarget
from gateway.settings.load import load
from tests.gateway.cli.shared.fake_gateway import serving

BEFORE = """\
# TYPE tollgate_requests counter
tollgate_requests_total{model="penny",route="/v1/chat/completions",status="200"} 10
tollgate_requests_total{model="penny",route="/v1/completions",status="200"} 5
tollgate_requests_total{model="",route="/metrics",status="200"} 99
# TYPE tollgate_tokens counter
tollgate_tokens_total{kind="output",model="penny"} 100
"""
AFTER = """\
# TYPE tollgate_requests counter
tollgate_requests_total{model="penny",route="/v1/chat/completions",status="200"} 13
tollgate_requests_total{model="penny",route="/v1/completions",status="200"} 5
tollgate_requests_total{model="penny",route="/v1/completions",status="503"} 1
tollgate_requests_total{model="far",route="/v1/completions",status="200"} 1
# TYPE tollgate_tokens counter
tollgate_tokens_total{kind="output",model="penny"} 140
tollgate_tokens_total{kind="uncached",model="penny"} 30
tollgate_tokens_total{kind="cache_read",model="penny"} 10
# TYPE tollgate_time_to_first_token_seconds histogram
tollgate_time_to_first_token_seconds_bucket{le="+Inf",model="penny"} 2
tollgate_time_to_first_token_seconds_count{model="penny"} 2
tollgate_time_to_first_token_seconds_sum{model="penny"} 0.5
# TYPE tollgate_num_requests_running gauge
tollgate_num_requests_running{model="penny"} 3
"""


def test_rates_are_what_grew_by_the_second() -> None:
    penny, far = rates(sample_of(BEFORE, 10.0), sample_of(AFTER, 12.0))
    assert penny == {
        "model": "penny",
        "requests_s": 2.0,
        "failed_s": 0.5,
        "running": 3.0,
        "waiting": 0.0,
        "input_s": 20.0,
        "output_s": 20.0,
        "cached": 0.25,
        "ttft_s": 0.25,
        "kv_used": None,
    }
    assert (far["model"], far["requests_s"], far["cached"]) == ("far", 0.5, None)


def test_counters_of_a_new_start_are_no_negative_rates() -> None:
    (row, *_) = rates(sample_of(AFTER, 1.0), sample_of(BEFORE, 2.0))
    assert row["requests_s"] == 0.0
    assert row["output_s"] == 0.0


def test_metrics_of_a_listener_of_their_own_are_found_by_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving() as gateway, serving() as metrics:
        port = metrics.server_address[1]
        (tmp_path / "tollgate.toml").write_text(f"[metrics]\nport = {port}\n")
        metrics.on("GET", "/metrics", BEFORE.encode(), AFTER.encode())
        done = gateway.run("top", "--once", "--interval", "0.2", "--json")
        assert done.exit_code == 0 and gateway.asked == [], done.output
        far = GatewayTarget("https://gateway.example", "--url", "k")
        assert origin_of_metrics(load({}, {}), far) == far.base


def test_once_prints_one_table_or_objects() -> None:
    with serving() as gateway:
        gateway.on("GET", "/metrics", BEFORE.encode(), AFTER.encode())
        done = gateway.run("top", "--once", "--interval", "0.2", "--json")
        assert done.exit_code == 0, done.output
        assert {json.loads(line)["model"] for line in done.stdout.splitlines()} == {"penny", "far"}
        gateway.on("GET", "/metrics", b"x", status=404)
        assert "--metrics names the address" in gateway.run("top", "--once").stderr
        gateway.on("GET", "/metrics", b"<html>")
        assert "no metrics of Prometheus" in gateway.run("top", "--once").stderr
