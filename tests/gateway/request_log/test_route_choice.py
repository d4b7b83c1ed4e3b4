"""Reads back what the stage `route` says, as it was written."""

from __future__ import annotations

from typing import get_args

from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.stages import Stages
from gateway.fleet.fetching import Fetch
from gateway.fleet.routing import Candidate, Choice, RouteReason, Split, explain
from gateway.generation_events import CachedTokens
from gateway.request_log.answers import MAX_ROUTE_CHARS, stages_of
from gateway.request_log.route_choice import choices_of, found_of, read_choice
from tests.budget import examples

TOKENS = st.integers(0, 10**6)
SECONDS = st.floats(0, 1e4, allow_nan=False)


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    number = draw(st.integers(2, 6))
    candidates = []
    for at in range(number):
        cached = draw(TOKENS)
        source = draw(st.integers(0, number - 1).filter(lambda each, at=at: each != at))
        fetch = Fetch(source, cached + draw(TOKENS), draw(SECONDS))
        candidates.append(
            Candidate(draw(SECONDS), cached, fetch=draw(st.sampled_from([None, fetch])))
        )
    order = tuple(draw(st.permutations(range(number))))
    reason = draw(st.sampled_from(get_args(RouteReason)))
    split = Split(order[0], order[1], draw(SECONDS)) if reason == "split" else None
    return Choice(order, reason, tuple(candidates), split)


@given(choices())
@settings(max_examples=examples(50), deadline=None)
def test_what_is_explained_is_read(choice: Choice) -> None:
    found = read_choice(explain(choice, [f"penny/{at}" for at in choice.order]))
    assert found is not None and found.reason == choice.reason
    assert [each.replica for each in found.candidates] == [str(at) for at in choice.order]
    parts = found.split and (int(found.split.prefill), int(found.split.decode))
    assert parts == (choice.split and (choice.split.prefill, choice.split.decode))
    for at, each in zip(choice.order, found.candidates, strict=True):
        made = choice.candidates[at]
        assert abs(each.predicted_ttft_s - made.predicted_s) <= 0.005 * made.predicted_s
        assert each.cached_tokens == made.cached
        assert each.cached_tokens + each.fetched_tokens == made.front
        assert each.fetched_from == (None if made.fetch is None else str(made.fetch.source))


def test_of_a_text_that_the_log_cut_the_whole_candidates_are_read() -> None:
    told = ["least_work", *(f"{at} in 0.12 s with {1024 + at}" for at in range(100))]
    context = Stages()
    context.begin("route", ", ".join(told)).end()
    kept = stages_of(context, 0.0)
    assert kept is not None and len(kept[0].about) == MAX_ROUTE_CHARS
    found = read_choice(kept[0].about)
    assert found is not None and len(found.candidates) > 30
    assert [each.cached_tokens - 1024 for each in found.candidates] == [
        *range(len(found.candidates))
    ]


def test_what_is_no_choice_is_none() -> None:
    for text in ("", "cached", "cached, somewhere", "cached, 0 in 0.1 s, else"):
        assert read_choice(text) is None, text
    stages = [("attempt", 0, 1, "penny/0", ""), ("route", 0, 1, "cached, 0 in 0.1 s", "")]
    assert [each.reason for each in choices_of(stages)] == ["cached"]


def test_where_cached_tokens_were_found_is_read() -> None:
    for found in (CachedTokens(), CachedTokens(16), CachedTokens(0, 32, 128), CachedTokens(1, 2)):
        stages = [("queue", 0, 1, "", ""), ("prefill", 0, 1, str(found), "")]
        assert found_of(stages) == [found]
    assert found_of([("prefill", 0, 1, "", "")]) == [], "nobody knows"
