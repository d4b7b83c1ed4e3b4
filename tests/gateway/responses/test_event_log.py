"""An event log gathers a stream until it is written: in order, without a gap, within its bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.responses import events
from gateway.responses.events import EventLog, after_events
from gateway.responses.kept import ResponseOwner

OWNER = ResponseOwner("org", "proj")
CHUNKS = st.lists(st.integers(0, 4), max_size=6)
"""Numbers of events in each."""


def named(first: int, number: int) -> bytes:
    return b"".join(b"event: e\ndata: %d\n\n" % index for index in range(first, first + number))


@given(st.lists(st.tuples(CHUNKS, st.sampled_from(["written", "failed"]))))
def test_what_is_taken_has_its_numbers_whatever_fails(rounds: list[tuple[list[int], str]]) -> None:
    log, num_added, written = EventLog(OWNER, "resp"), 0, b""
    for chunks, outcome in [*rounds, ([], "written")]:
        for number in chunks:
            log.add(named(num_added, number))
            num_added += number
        some = log.take()
        if some is None:
            continue
        assert some.content == named(some.first, some.last - some.first + 1)
        if outcome == "failed":
            log.put_back(some)
        else:
            written += some.content
    assert written == named(0, num_added)


def test_what_waits_too_long_to_be_written_loses_its_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "MAX_BYTES", 100)
    log = EventLog(OWNER, "resp")
    log.add(named(0, 50))
    some = log.take()
    assert some is not None
    log.put_back(some)
    log.add(named(50, 1))
    left = log.take()
    assert left is not None and left.last == 50
    assert left.content == named(left.first, 51 - left.first) and len(left.content) < 130


@given(st.integers(0, 9), st.integers(0, 9))
def test_events_are_skipped_whole(number: int, skipped: int) -> None:
    skipped = min(number, skipped)
    assert after_events(named(0, number), skipped) == named(skipped, number - skipped)
