"""A request says of itself before it is in the books what it says after."""

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from billing.events import UsageEvent
from billing.tables import to_moment
from gateway.wire.usage.own_view import latency_ms_of
from tests.billing.samples import NOON, an_attempt, an_event

BETWEEN = 1_796_387_836.7273655
"""Times a million it is half a microsecond more than it is."""


@given(st.floats(NOON, 2 * NOON), st.integers(0, 5_000))
@example(BETWEEN, 500)
@example(BETWEEN, 501)
def test_its_latency_is_that_of_the_moments_that_postgres_keeps(
    admitted_at: float, took_us: int
) -> None:
    event = lasting(admitted_at, admitted_at + took_us / 1e6)
    booked = lasting(*(kept(at) for at in (admitted_at, event.occurred_at)))
    assert latency_ms_of(event) == latency_ms_of(booked)


def lasting(admitted_at: float, occurred_at: float) -> UsageEvent:
    event = an_event(an_attempt(admitted_at=admitted_at))
    return msgspec.structs.replace(event, occurred_at=occurred_at)


def kept(unix_s: float) -> float:
    return to_moment(unix_s).timestamp()
