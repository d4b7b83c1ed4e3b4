"""The limiter's pure parts: what a key is expected to write, and what clients are told."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits import output_forecast as expected_output
from gateway.limits.headers import to_duration, to_headers
from gateway.limits.outcomes import RateWindow, burst, rate_window
from gateway.limits.output_forecast import UNKNOWN_OUTPUT_TOKENS, ExpectedOutput
from gateway.limits.redis.scope_limits import BucketLimit
from gateway.principal import MINUTE_US

START_US = 1_700_000_000_000_000


def test_the_expected_output_is_the_p95_of_the_last_answers() -> None:
    outputs = ExpectedOutput()
    for tokens in range(1000, 0, -1):
        outputs.note("k", "m", tokens)
    assert outputs.expected("k", "m") == 61, "of 64, 63, ... 1"
    assert outputs.expected("k", "other") == UNKNOWN_OUTPUT_TOKENS


def test_writers_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_output, "MAX_WRITERS", 2)
    outputs = ExpectedOutput()
    for key in ("a", "b", "a", "c"):
        for _ in range(8):
            outputs.note(key, "m", 1)
    assert [outputs.expected(key, "m") == 1 for key in "abc"] == [True, False, True]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.012, "12ms"),
        (0.9991, "1s"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (3599.25, "59m59.25s"),
        (7201, "2h0m1s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert to_duration(seconds) == text


def test_headers_show_the_tightest_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {
        "requests": RateWindow(limit=60, remaining=9, reset_s=1.0),
        "tokens": RateWindow(limit=6000, remaining=0, reset_s=61.5),
    }
    now_s = 1_769_860_799.5
    monkeypatch.setattr(time, "time", lambda: now_s)
    assert to_headers(state) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m1.5s",
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "9",
        "anthropic-ratelimit-requests-reset": "2026-01-31T12:00:01Z",
        "anthropic-ratelimit-tokens-limit": "6000",
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": "2026-01-31T12:01:01Z",
    }


@given(limit=st.integers(0, 10**7), deficit_us=st.integers(0, 10**9))
def test_a_window_shows_what_the_bucket_holds(limit: int, deficit_us: int) -> None:
    bucket = BucketLimit("t", limit, burst(limit), MINUTE_US)
    window = rate_window(bucket, START_US + deficit_us, START_US)
    assert window.reset_s == deficit_us / 1_000_000
    held = burst(limit) - Fraction(deficit_us * limit, 60_000_000) if limit else 0
    assert window.remaining - Fraction(limit, 60_000_000) <= max(0, held) < window.remaining + 1
