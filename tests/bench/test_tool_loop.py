"""The rounds of a loop are counted."""

from __future__ import annotations

from bench.tool_loop import Round, excess, new_tokens, summary
from engine.config import BLOCK_SIZE


def test_what_is_new_stands_behind_the_answer_of_the_round_before() -> None:
    rounds = [Round(100, 0, 20), Round(36, 96, 5), Round(10 + BLOCK_SIZE + 1, 130, 5)]
    assert new_tokens(rounds) == [12, 20]
    assert excess(rounds) == [24, 7]


def test_one_round_too_many_breaks_the_claim() -> None:
    good = [Round(100, 0, 20), Round(12 + BLOCK_SIZE, 120 - BLOCK_SIZE, 5)]
    bad = [Round(100, 0, 20), Round(13 + BLOCK_SIZE, 119 - BLOCK_SIZE, 5)]
    claim = f"at_most_new_and_{BLOCK_SIZE}"
    assert summary([good, good])["claims"] == {claim: True}
    assert summary([good, bad])["claims"] == {claim: False}
    assert summary([good])["rounds"] == [2]
