"""The pace against a machine whose true costs it does not know."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pace import FIRST_CHUNK, MIN_CHUNK, Pace

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
    """Whatever it believed of the decodes' time, and without ever seeing them alone."""
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
