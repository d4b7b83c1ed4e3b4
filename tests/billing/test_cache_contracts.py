"""What is billed as read is a floor under what was reused, and the parts are the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.cache_contracts import (
    CONTRACTS,
    FLOORS,
    MAX_BREAKPOINTS,
    Breakpoint,
    ContractName,
    InputSplit,
    split_input,
    what_is_wrong,
)

MAX_TOKENS = 300_000
tokens = st.integers(0, MAX_TOKENS)


@st.composite
def breakpoints(draw: st.DrawFn, prompt: int) -> list[Breakpoint]:
    positions = sorted(draw(st.sets(st.integers(1, max(1, prompt)), max_size=MAX_BREAKPOINTS)))
    hours = draw(st.integers(0, len(positions)))
    return [
        Breakpoint(
            position,
            "1h" if number < hours else "5m",
            tuple(draw(st.sets(st.integers(1, position), max_size=30))),
        )
        for number, position in enumerate(positions)
    ]


@given(st.data(), st.sampled_from(CONTRACTS), tokens, tokens)
def test_the_parts_are_the_prompt_and_nothing_is_read_that_was_not_reused(
    data: st.DataObject, contract: ContractName, one: int, other: int
) -> None:
    reused, prompt = sorted((one, other))
    found = data.draw(breakpoints(prompt)) if prompt else []
    split = split_input(contract, prompt, reused, found)
    parts = (split.uncached, split.cache_read, split.cache_write_5m, split.cache_write_1h)
    assert sum(parts) == prompt and min(parts) >= 0
    floor = FLOORS[contract]
    assert split.cache_read <= reused
    assert split.cache_read == 0 or split.cache_read >= floor.min_tokens
    assert split.cache_read % floor.step == 0
    less = split_input(contract, prompt, reused // 2, found)
    assert less.cache_read <= split.cache_read, "who reuses more is billed no less as read"
    if contract != "explicit":
        assert split.cache_write_5m == split.cache_write_1h == 0
        assert reused - split.cache_read < max(floor.step, floor.min_tokens)
    elif found:
        assert what_is_wrong(found, prompt) is None
        last = found[-1].position
        written = split.cache_write_5m + split.cache_write_1h
        assert split.cache_read + written == max(
            split.cache_read, last if last >= floor.min_tokens else 0
        )


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


def test_an_explicit_contract_reads_to_a_breakpoint_and_writes_to_the_last() -> None:
    system = Breakpoint(2000, "1h")
    turn = Breakpoint(4500, "5m", lookback=(2500, 3000))

    def split(reused: int) -> InputSplit:
        return split_input("explicit", 5000, reused, [system, turn])

    cold = InputSplit(uncached=500, cache_write_1h=2000, cache_write_5m=2500)
    assert split(0) == split(1999) == cold
    assert split(2000) == InputSplit(uncached=500, cache_read=2000, cache_write_5m=2500)
    assert split(3100) == InputSplit(uncached=500, cache_read=3000, cache_write_5m=1500)
    assert split(5000) == InputSplit(uncached=500, cache_read=4500)
    short = split_input("explicit", 1100, 1100, [Breakpoint(1023)])
    assert short == InputSplit(uncached=1100), "too short to be kept"
    far = Breakpoint(4500, "5m", lookback=tuple(range(2000, 4000, 10)))
    assert split_input("explicit", 5000, 3000, [far]).cache_read == 0, "20 blocks, no more"


def test_breakpoints_that_mean_nothing_are_named() -> None:
    assert what_is_wrong([Breakpoint(n) for n in range(1, 6)], 9) == "at most 4 breakpoints"
    for found in ([Breakpoint(3), Breakpoint(2)], [Breakpoint(10)], [Breakpoint(0)]):
        assert "in order and within the prompt" in (what_is_wrong(found, 9) or "")
    assert "1h must come before" in (what_is_wrong([Breakpoint(1), Breakpoint(2, "1h")], 9) or "")
