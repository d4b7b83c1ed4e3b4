"""Four gateway processes on one Redis, asked for more than there is by 64 and by 512 requests at
once: what passes stays within the stated bound, and every token is counted once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.limits.processes import Outcome, Scenario, run
from bench.limits.windows import most_at_once, worst_ratio

pytestmark = pytest.mark.slow


def check(found: Outcome) -> None:
    assert found.admitted_ratio <= 1.0, found.ratios
    assert found.with_steps_ratio <= 1.0
    assert found.streams_ratio <= 1.0
    tried, refused = found.double_settles
    assert tried == refused > 0
    tried, refused = found.replays_of_ended
    assert tried == refused > 0
    assert found.miscounted_us == 0, "no token is lost, and none is counted twice"
    assert found.admitted_ratio > 0.8 and found.refused > 0, "they asked for more than there is"
    assert found.replayed > 0 and found.extended > 0 and found.rested > 0


def test_64_at_once_and_a_process_that_is_killed_whose_leases_expire(
    redis_url: str, tmp_path: Path
) -> None:
    found = run(
        redis_url,
        tmp_path,
        Scenario(
            concurrency=64, scale=64, seconds=9, lease_ttl_s=3, killed_after_s=1, await_expiry=True
        ),
    )
    check(found)
    assert found.recovered["LATE"] > 0
    assert found.recovered.keys() <= {"LATE", "REPLAYED"}


def test_slices_pass_no_more_with_a_process_that_is_killed(redis_url: str, tmp_path: Path) -> None:
    """How many pass by slices depends on the machine: of a busy one a longer story is asked."""
    for seconds in (6, 12, 24):
        folder = tmp_path / str(seconds)
        folder.mkdir()
        found = run(
            redis_url,
            folder,
            Scenario(
                concurrency=64,
                scale=640,
                seconds=seconds,
                lease_ttl_s=3,
                killed_after_s=2,
                await_expiry=True,
                with_slices=True,
            ),
        )
        assert found.admitted_ratio <= 1.0, found.ratios
        assert found.with_steps_ratio <= 1.0 and found.streams_ratio <= 1.0
        if found.of_slices > 0:
            break
    assert found.admitted > found.of_slices > 0


@pytest.mark.nightly
def test_512_at_once_and_a_process_that_is_killed(redis_url: str, tmp_path: Path) -> None:
    found = run(
        redis_url,
        tmp_path,
        Scenario(
            concurrency=512,
            scale=96,
            seconds=8,
            lease_ttl_s=60,
            killed_after_s=1,
            await_expiry=False,
        ),
    )
    check(found)
    assert found.recovered["SETTLED"] > 0
    assert found.recovered.keys() <= {"SETTLED", "REPLAYED"}


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), max_size=12), st.integers(1, 200)
)
def test_the_worst_window_is_that_of_all_windows(
    events: list[tuple[int, int]], longest: int
) -> None:
    base, limit, minute = 5, 60, 120
    ratios = [0.0]
    for start, _ in events:
        for end, _ in events:
            if start <= end <= start + longest:
                passed = sum(units for at, units in events if start <= at <= end)
                ratios.append(passed * minute / (base * minute + limit * (end - start)))
    found = worst_ratio(events, base=base, limit=limit, longest_us=longest, minute_us=minute)
    assert found == pytest.approx(max(ratios))


def test_what_ends_when_another_begins_is_not_open_beside_it() -> None:
    assert most_at_once([(0, 5), (5, 9), (6, 7)]) == 2
