"""Guesses and their worth, without a model; losslessness is shown with one, in `test_core.py`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import SamplingParams
from engine.runner.speculative.guesser import (
    LONGEST_NGRAM,
    PLAIN_EVERY,
    RETRY_TOKENS,
    SHORTEST_NGRAM,
    TRIAL_STEPS,
    NgramProposer,
    Worth,
)
from engine.sequence import Sequence


def sequence(prompt: list[int], request_id: str = "a") -> Sequence:
    return Sequence(
        request_id=request_id,
        index=0,
        order=(0, 0),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=1000),
        seed=0,
        cache_salt="",
    )


def naive(ids: list[int], count: int) -> list[int]:
    """The definition, slowly."""
    for length in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
        if length >= len(ids):
            continue
        for start in range(len(ids) - length - 1, -1, -1):
            if ids[start : start + length] == ids[-length:]:
                return ids[start + length : start + length + count]
    return []


@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    said=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=8),
    count=st.integers(1, 6),
)
def test_ngrams_continue_as_their_latest_occurrence_did(
    prompt: list[int], said: list[list[int]], count: int
) -> None:
    proposer, seq = NgramProposer(count), sequence(prompt)
    assert proposer.propose(seq) == naive(prompt, count)
    for tokens in said:
        seq.output_token_ids += tokens
        assert proposer.propose(seq) == naive(seq.token_ids, count)


def test_what_is_not_kept_is_forgotten() -> None:
    proposer, worth = NgramProposer(2), Worth()
    seqs = [sequence([1, 2, 1, 2], name) for name in ("a", "b")]
    for seq in seqs:
        proposer.propose(seq)
        assert worth.is_worth_it(seq)
    proposer.keep_only(seqs[:1])
    worth.keep_only(seqs[:1])
    assert proposer._texts.keys() == worth._records.keys() == {("a", 0)}


def learn_times(worth: Worth, plain_s: float, verifying_s: float) -> None:
    worth.observe_step(verifying=False, step_s=plain_s, num_decodes=4)
    worth.observe_step(verifying=True, step_s=verifying_s, num_decodes=4)


def test_guesses_that_are_never_right_are_given_up_and_tried_again_later() -> None:
    worth, seq = Worth(), sequence([1, 2, 3])
    learn_times(worth, 0.010, 0.012)
    for _ in range(TRIAL_STEPS):
        assert worth.is_worth_it(seq)
        seq.output_token_ids.append(5)
        worth.observe(seq, 0, 4)
    assert not worth.is_worth_it(seq)
    seq.output_token_ids += [5] * RETRY_TOKENS
    assert worth.is_worth_it(seq)


def test_guesses_are_kept_while_they_gain_more_than_they_cost() -> None:
    worth, seq = Worth(), sequence([1, 2, 3])
    learn_times(worth, 0.010, 0.015)
    for _ in range(50):
        worth.observe(seq, 1, 4)
        assert worth.is_worth_it(seq)
    for _ in range(50):
        worth.observe(seq, 0, 4)
    assert not worth.is_worth_it(seq)


def test_free_guesses_are_never_given_up() -> None:
    worth, seq = Worth(), sequence([1, 2, 3])
    learn_times(worth, 0.010, 0.009)
    for _ in range(50):
        worth.observe(seq, 0, 4)
    assert worth.is_worth_it(seq)


def test_a_plain_step_is_wanted_now_and_then() -> None:
    worth = Worth()
    worth.observe_step(verifying=False, step_s=0.01, num_decodes=1)
    for _ in range(PLAIN_EVERY):
        assert not worth.wants_plain_step(1)
        worth.observe_step(verifying=True, step_s=0.01, num_decodes=1)
    assert worth.wants_plain_step(1)
    worth.observe_step(verifying=False, step_s=0.01, num_decodes=1)
    assert not worth.wants_plain_step(1)


def test_a_plain_step_is_wanted_where_none_was_seen() -> None:
    worth = Worth()
    worth.observe_step(verifying=False, step_s=0.01, num_decodes=1)
    assert not worth.wants_plain_step(4)
    worth.observe_step(verifying=True, step_s=0.02, num_decodes=4)
    assert worth.wants_plain_step(5) and not worth.wants_plain_step(1)
    worth.observe_step(verifying=False, step_s=0.01, num_decodes=5)
    assert not worth.wants_plain_step(4)
