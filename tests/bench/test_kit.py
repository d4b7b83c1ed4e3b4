"""Figures that the C load generator prints are read as our own sums up."""

from __future__ import annotations

from bench.tools.kit import to_summary
from bench.tools.load import Tally

WHOLE = {
    "ok": 90,
    "errs": 2,
    "non200": 1,
    "rps": 30.0,
    "lat_ms": {"p50": 1.5, "p90": 2.0, "p99": 3.5, "p999": 4.0, "max": 4.0},
}


def test_whole_answers() -> None:
    found = to_summary(WHOLE)
    assert found["requests"] == 90 and found["errors"] == 3
    assert found["latency_ms"] == {"p50": 1.5, "p99": 3.5, "max": 4.0}
    assert found["first_byte_ms"] == {"p50": 1.5, "p99": 3.5}


def test_streams() -> None:
    ttft = {"p50": 0.5, "p90": 0.6, "p99": 0.7}
    found = to_summary({**WHOLE, "events": 640, "events_per_s": 2000, "ttft_ms": ttft})
    assert found["first_byte_ms"] == {"p50": 0.5, "p99": 0.7}
    assert found["events_per_s"] == 2000


def test_both_sum_up_alike() -> None:
    ours = Tally(latencies_s=[0.001], first_bytes_s=[0.001], elapsed_s=1.0).summary()
    assert to_summary(WHOLE).keys() == ours.keys()
