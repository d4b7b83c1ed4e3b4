"""Attempts: ever further apart, some dozen in a day, none far beyond what a receiver asks for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.webhooks import mail_channel
from gateway.webhooks.queue import (
    LIFETIME_S,
    MAX_DELAY_S,
    MAX_RETRY_AFTER_S,
    SPREAD,
    delay_s,
)


def middle(low: float, high: float) -> float:
    return (low + high) / 2


@given(st.integers(1, 10**6), st.floats(0, 1), st.none() | st.text())
def test_a_delay_is_bounded_whatever_the_receiver_says(
    attempts: int, share: float, retry_after: str | None
) -> None:
    found = delay_s(attempts, lambda low, high: low + share * (high - low), retry_after=retry_after)
    assert 0 < found <= max(MAX_DELAY_S * (1 + SPREAD), MAX_RETRY_AFTER_S)


def test_there_are_some_dozen_attempts_in_a_day() -> None:
    at, attempts = 0.0, 0
    while at < LIFETIME_S:
        attempts += 1
        at += delay_s(attempts, middle)
    assert 12 <= attempts <= 16


def test_a_receiver_puts_us_off() -> None:
    said = ("120", "2", "9" * 30, "soon", "-1", "١٢")
    assert [delay_s(1, middle, retry_after=each) for each in said] == [
        120.0, 5.0, MAX_RETRY_AFTER_S, 5.0, 5.0, 5.0,
    ]  # fmt: skip


def test_mail_follows_a_server_that_is_back_by_a_quarter_of_an_hour() -> None:
    at, attempts = 0.0, 0
    while at < 3600:
        attempts += 1
        at += delay_s(attempts, middle, max_s=mail_channel.MAX_DELAY_S)
    assert at < 3600 + 900 and attempts < 12
