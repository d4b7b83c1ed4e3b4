"""The pace against a machine whose true costs it does not know."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.pace import FIRST_CHUNK, MIN_CHUNK, Pace
from tests.engine.scheduling.scheduling import Clock, make, request

BUDGET = 8192


def machine(num_decodes: int, prompt_tokens: int, base: float, each: float, token: float) -> float:
    return base + each * num_decodes + token * prompt_tokens


@given(
    base=st.floats(0.001, 0.05),
    each=st.floats(0.0, 0.001),
    token=st.floats(1e-5, 2e-3),
    num_decodes=st.integers(1, 64),
    stale=st.one_of(st.none(), st.floats(0.001, 0.3)),
)
def test_mixed_steps_settle_at_the_target(
    base: float, each: float, token: float, num_decodes: int, stale: float | None
) -> None:
    """Check it whatever it believed of the decodes' time, and without ever seeing them alone."""
    pace = Pace(0.2)
    if stale is not None:
        pace.observe(num_decodes, 0, stale)
    for _ in range(80):
        chunk = pace.prompt_tokens(num_decodes, BUDGET)
        pace.observe(num_decodes, chunk, machine(num_decodes, chunk, base, each, token))
    took = machine(num_decodes, chunk, base, each, token)
    alone = machine(num_decodes, MIN_CHUNK, base, each, token)
    reachable = max(alone, min(0.2, machine(num_decodes, BUDGET, base, each, token)))
    assert took == pytest.approx(reachable, abs=max(0.02, 2 * token)) or took < reachable
    # Unless the believed decode time is far off, most of the target is used, too.
    if stale is None:
        assert took >= 0.75 * reachable


def test_without_decodes_nobody_waits() -> None:
    pace = Pace(0.001)
    pace.observe(0, 512, 1.0)
    assert pace.prompt_tokens(0, BUDGET) == BUDGET


def test_without_a_target_there_is_no_limit() -> None:
    pace = Pace(None)
    pace.observe(4, 512, 100.0)
    assert pace.prompt_tokens(4, BUDGET) == BUDGET


def test_first_chunk_is_careful_and_prompts_always_progress() -> None:
    pace = Pace(0.05)
    assert pace.prompt_tokens(1, BUDGET) == FIRST_CHUNK
    pace.observe(0, 512, 10.0)
    assert pace.prompt_tokens(1, BUDGET) == MIN_CHUNK
    assert pace.prompt_tokens(1, 3) == 3


def test_a_slower_machine_is_noticed() -> None:
    pace = Pace(0.2)
    for _ in range(5):
        pace.observe(0, 512, 0.1)
    fast = pace.prompt_tokens(8, BUDGET)
    for _ in range(10):
        pace.observe(0, 512, 1.0)
    assert pace.prompt_tokens(8, BUDGET) < fast / 5


# A long prompt beside others' decodes, on virtual time


def intervals(
    pace: Pace,
    prompt: int,
    *,
    base: float,
    each: float,
    token: float,
    twice_after: int = 50_000,
    reading: float = 0.0,
) -> list[float]:
    """Seconds between two tokens of those that decode, from the step on in which another tenant's
    prompt arrives until it is computed (and for 600 steps without one). A token of the prompt takes
    the longer the more come before it, and a chunk takes `reading` for each of those, whatever its
    size."""
    clock, rng = Clock(), random.Random(3)
    scheduler = make(
        4000, block_size=64, max_num_batched_tokens=2048, max_model_len=120_000,
        clock=clock, pace=pace,
    )  # fmt: skip
    for number in range(6):
        turn = {"tenant": f"t{number}"}
        scheduler.add(request(f"d{number}", 5, max_tokens=100_000, turn=turn))
    found, last_s, is_done = [], 0.0, False
    for number in range(100_000):
        if number == 100 and prompt:
            scheduler.add(request("long", prompt, max_tokens=1, turn={"tenant": "long"}))
        output = scheduler.schedule()
        chunks = [entry for entry in output.scheduled if not entry.decodes]
        num_decodes = len(output.scheduled) - len(chunks)
        num_prompt_tokens = output.num_tokens - num_decodes
        step_s = base + each * num_decodes
        step_s += sum(token * e.num_new_tokens * (1 + e.start / twice_after) for e in chunks)
        step_s += sum(reading * e.start for e in chunks)
        step_s *= rng.uniform(0.97, 1.03)
        clock.now += step_s
        pace.observe(num_decodes, num_prompt_tokens, step_s, output.num_long_tokens)
        answers = scheduler.update(
            output, {s.key: [(1, None)] for s in output.scheduled if s.samples}
        )
        if number > 100:
            found.append(clock.now - last_s)
        last_s = clock.now
        is_done = is_done or any(o.request_id == "long" and o.finished for o in answers)
        if is_done or (not prompt and number == 700):
            return found
    raise AssertionError("the prompt was never computed")


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))]


@pytest.mark.parametrize(
    ("base", "each", "token"), [(0.01, 0.0002, 2e-5), (0.03, 0.001, 1e-4), (0.1, 0.0, 4e-4)]
)
def test_a_prompt_of_100k_tokens_delays_nobody_by_half(
    base: float, each: float, token: float
) -> None:
    costs = {"base": base, "each": each, "token": token}
    alone = p99(intervals(Pace(0.2), 0, **costs))
    beside = intervals(Pace(0.2), 100_000, **costs)
    assert p99(beside) <= 1.5 * alone
    # What is left to it is used: at a fifth of the decodes' time at least, on average.
    assert sum(beside) / len(beside) >= 1.2 * base


def test_a_chunk_is_a_time_however_much_comes_before_it() -> None:
    """At its end two tokens take what is left to it."""
    costs: dict[str, Any] = {"base": 0.01, "each": 0.0, "token": 2e-5, "twice_after": 300}
    alone = p99(intervals(Pace(0.2), 0, **costs))
    beside = intervals(Pace(0.2), 30_000, **costs)
    assert p99(beside) <= 1.5 * alone
    assert p99(beside[-1000:]) <= 1.5 * alone
    assert sum(beside) / len(beside) >= 1.2 * 0.01


def test_where_a_token_takes_too_long_the_decodes_get_it_back() -> None:
    """Ten times the share, for reading alone, at its end: it is not each step that is held to the
    share then, but all of them together."""
    costs: dict[str, Any] = {"base": 0.01, "each": 0.0, "token": 2e-5, "reading": 2e-6}
    beside = intervals(Pace(0.2), 20_000, **costs)
    assert sum(beside) / len(beside) <= 1.5 * 0.01
    assert sum(beside) / len(beside) >= 1.2 * 0.01
    assert max(beside) > 0.04, "or nothing was too long"


def test_short_prompts_do_not_make_a_long_one_look_cheap() -> None:
    pace = Pace(0.2)
    pace.observe(4, 0, 0.01)
    for _ in range(20):
        pace.observe(4, 200, 0.01 + 200 * 2e-5)
    for _ in range(20):
        pace.observe(4, 2, 0.01 + 2 * 1.5e-3, 2)
    alone = pace.long_prompt_tokens(4, BUDGET)
    for _ in range(20):
        pace.observe(4, 202, 0.01 + 200 * 2e-5 + 2 * 1.5e-3, 2)
    assert pace.long_prompt_tokens(4, BUDGET) == alone == 2
    assert pace.prompt_tokens(4, BUDGET) > BUDGET / 2, "nor a long one the short ones dear"


def test_with_the_target_alone_it_would() -> None:
    costs = {"base": 0.01, "each": 0.0002, "token": 2e-5}
    pace = Pace(0.2)
    pace.long_prompt_tokens = pace.prompt_tokens  # type: ignore[method-assign]
    assert p99(intervals(pace, 100_000, **costs)) > 3 * p99(intervals(Pace(0.2), 0, **costs))


def test_a_long_prompt_gets_on_whatever_is_known() -> None:
    """Its steps are never of a kind that tells anything, or short prompts are in all of them."""
    pace = Pace(0.05)
    chunks = []
    for _ in range(200):
        chunks.append(pace.long_prompt_tokens(3, BUDGET))
        pace.overlook(3)
    assert chunks.count(0) < 20 and set(chunks) == {0, MIN_CHUNK}
    pace.observe(3, 0, 1.0)
    pace.observe(3, 512, 3.0)
    chunks = []
    for _ in range(200):
        chunks.append(pace.long_prompt_tokens(3, BUDGET))
        pace.observe(3, 512, 3.0)
    assert chunks.count(0) < 20 and min(set(chunks) - {0}) >= MIN_CHUNK


def test_long_prompts_have_no_limit_without_decodes_or_a_target() -> None:
    assert Pace(0.05).long_prompt_tokens(0, BUDGET) == BUDGET
    assert Pace(None).long_prompt_tokens(5, BUDGET) == BUDGET


def computed(pace: Pace, steps: int, *, decode: float, chunk: float, token: float) -> int:
    """Tokens of a long prompt that so many steps compute beside decodes, which take `decode`; a
    chunk takes `chunk` whatever its size."""
    pace.observe(6, 0, decode)
    total = 0
    for _ in range(steps):
        count = pace.long_prompt_tokens(6, BUDGET)
        pace.observe(6, count, decode + (chunk + token * count if count else 0.0), count)
        total += count
    return total


def test_single_tokens_would_not_get_on(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"decode": 0.01, "chunk": 0.04, "token": 2e-5}
    spaced = computed(Pace(0.2), 2000, **costs)
    monkeypatch.setattr("engine.scheduling.pace.SPACED_CHUNK", 1)
    assert spaced > 20 * computed(Pace(0.2), 2000, **costs)


def times_the_decodes(pace: Pace) -> float:
    """How many times as long as its decodes a step with a long prompt takes at most, when they have
    become three times as fast since it began."""
    decode, token, most = 0.03, 1e-4, 0.0
    pace.observe(6, 0, decode)
    for number in range(1000):
        if number == 300:
            decode /= 3
        count = pace.long_prompt_tokens(6, BUDGET)
        pace.observe(6, count, decode + token * count, count)
        if number >= 700:
            most = max(most, 1 + token * count / decode)
    return most


def test_decodes_are_measured_while_a_long_prompt_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert times_the_decodes(Pace(0.2)) <= 1.5
    monkeypatch.setattr("engine.scheduling.pace.MEASURE_EVERY", 10**9)
    assert times_the_decodes(Pace(0.2)) > 1.6
