"""The tokens that are billed as read are a floor under what was reused, and the parts are the
prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.cache_contracts import (
    CONTRACTS,
    FLOORS,
    MAX_BREAKPOINTS,
    TTL_S,
    Breakpoint,
    ContractName,
    InputSplit,
    split_input,
    split_kept,
)

MAX_TOKENS = 300_000
tokens = st.integers(0, MAX_TOKENS)


def parts(split: InputSplit) -> tuple[int, ...]:
    return split.uncached, split.cache_read, split.cache_write_5m, split.cache_write_1h


@given(st.sampled_from(CONTRACTS), tokens, tokens)
def test_the_parts_are_the_prompt_and_nothing_is_read_that_was_not_reused(
    contract: ContractName, one: int, other: int
) -> None:
    reused, prompt = sorted((one, other))
    split = split_input(contract, prompt, reused)
    assert sum(parts(split)) == prompt and min(parts(split)) >= 0
    floor = FLOORS[contract]
    assert split.cache_read <= reused
    assert split.cache_read == 0 or split.cache_read >= floor.min_tokens
    assert split.cache_read % floor.step == 0
    assert split.cache_write_5m == split.cache_write_1h == 0
    less = split_input(contract, prompt, reused // 2)
    assert less.cache_read <= split.cache_read, "who reuses more is billed no less as read"
    if contract != "explicit":
        assert reused - split.cache_read < max(floor.step, floor.min_tokens)


@given(st.data(), st.integers(1, MAX_TOKENS))
def test_what_was_kept_is_read_and_what_is_promised_is_written(
    data: st.DataObject, prompt: int
) -> None:
    """As an engine tells: nothing is kept beyond the last breakpoint, nor written twice."""
    places = data.draw(st.sets(st.integers(1, prompt), min_size=1, max_size=MAX_BREAKPOINTS))
    found = [
        Breakpoint(at, data.draw(st.sampled_from([*TTL_S])), data.draw(st.integers(0, at)))
        for at in sorted(places)
    ]
    done = kept = data.draw(st.integers(0, found[-1].position))
    written = []
    for each in found:
        written.append(max(0, each.position - done) * data.draw(st.integers(0, 1)))
        done = max(done, each.position)
    split = split_kept(prompt, kept, written, found)
    assert sum(parts(split)) == prompt and min(parts(split)) >= 0
    assert split.cache_read <= kept
    assert split.cache_read == 0 or split.cache_read >= FLOORS["explicit"].min_tokens
    assert split.cache_write_5m + split.cache_write_1h == sum(written)


@pytest.mark.parametrize(
    ("contract", "reused", "read"),
    [
        ("native", 15, 0),
        ("native", 16, 16),
        ("native", 1023, 1008),
        ("automatic", 1023, 0),
        ("automatic", 1024, 1024),
        ("automatic", 1151, 1024),
        ("automatic", 1152, 1152),
        ("implicit", 1023, 0),
        ("implicit", 1025, 1025),
        ("explicit", 4096, 0),
    ],
)
def test_the_floors_at_their_boundaries(contract: ContractName, reused: int, read: int) -> None:
    assert split_input(contract, 5000, reused).cache_read == read


def test_a_breakpoint_reads_what_lies_within_its_reach_and_writes_for_its_lifetime() -> None:
    system, turn = Breakpoint(2000, "1h"), Breakpoint(4500, "5m", since=3000)

    def split(kept: int, *written: int) -> InputSplit:
        return split_kept(5000, kept, written, [system, turn])

    cold = split(0, 2000, 2500)
    assert cold == InputSplit(uncached=500, cache_write_1h=2000, cache_write_5m=2500)
    assert split(2000, 0, 2500) == InputSplit(uncached=500, cache_read=2000, cache_write_5m=2500)
    assert split(2900, 0, 1600).cache_read == 2000, "too far back for the second"
    assert split(3000, 0, 1500) == InputSplit(uncached=500, cache_read=3000, cache_write_5m=1500)
    assert split(1500, 0, 0) == InputSplit(uncached=3500, cache_read=1500), "no room to write"
    assert split(1023, 977, 2500).cache_read == 0, "less than the contract counts"
    far = Breakpoint(4500, "5m", since=3000)
    assert split_kept(5000, 2900, [1600], [far]).cache_read == 0, "20 blocks, no more"
