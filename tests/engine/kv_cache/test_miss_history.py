"""How far a prompt was seen before, against a comparison with all that came before it."""

from __future__ import annotations

from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.miss_history import PromptMemory
from engine.prefix_digests import SPAN_BLOCKS, block_digests, root_digest
from engine.protocol import SeenPrefix
from tests.engine.scheduling.scheduling import drain, make, request

SIZE = 2
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=9)
ASKED = st.lists(st.tuples(st.sampled_from("ab"), PROMPTS), max_size=20)


def digests(prompt: list[int], salt: str = "", size: int = SIZE) -> list[bytes]:
    chain = [root_digest(salt)]
    for start in range(0, len(prompt), SPAN_BLOCKS * size):
        chain += block_digests(chain[-1], prompt[start : start + SPAN_BLOCKS * size], size)
    return chain


def common(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def expected(prompt: list[int], earlier: list[list[int]], cached: int) -> SeenPrefix | None:
    tokens = max((common(prompt, each) for each in earlier), default=0)
    if not tokens:
        return None
    ended = any(len(each) == tokens == common(prompt, each) for each in earlier)
    cacheable = min(tokens, len(prompt) - 1) // SIZE * SIZE
    outcome = "repeated" if tokens == len(prompt) else "continued" if ended else "broken"
    return SeenPrefix(tokens, outcome, max(0, cacheable - cached))


@given(ASKED, st.integers(0, 4))
def test_unforgotten_prompts_are_compared_to_the_token(
    asked: list[tuple[str, list[int]]], cached_blocks: int
) -> None:
    memory = PromptMemory(SIZE, max_children=20)
    earlier: dict[str, list[list[int]]] = {"a": [], "b": []}
    for salt, prompt in asked:
        cached = min(cached_blocks, (len(prompt) - 1) // SIZE) * SIZE
        seen = memory.meet(prompt, digests(prompt, salt), cached)
        assert seen == expected(prompt, earlier[salt], cached), "of its own salt, and exactly"
        earlier[salt].append(prompt)


@given(ASKED, st.integers(1, 6), st.integers(1, 3))
def test_what_is_forgotten_is_only_ever_missed(
    asked: list[tuple[str, list[int]]], max_parents: int, max_children: int
) -> None:
    """Nothing is made up: what is said to be seen was, and at a break another token was there."""
    memory = PromptMemory(SIZE, max_parents=max_parents, max_children=max_children)
    earlier: dict[str, list[list[int]]] = {"a": [], "b": []}
    for salt, prompt in asked:
        seen = memory.meet(prompt, digests(prompt, salt), 0)
        if seen is not None:
            alike = [each for each in earlier[salt] if common(prompt, each) >= seen.tokens]
            assert alike, "so far nobody asked that"
            at = seen.tokens
            broke = any(
                len(each) > at and each[at : at + 1] != prompt[at : at + 1] for each in alike
            )
            assert broke or seen.outcome != "broken"
        earlier[salt].append(prompt)
        assert len(memory) <= max_parents
        again = memory.meet(prompt, digests(prompt, salt), 0)
        if len(prompt) // SIZE < max_parents:
            assert again is not None and again.outcome == "repeated", "the last one is known"


def test_the_least_recently_met_is_forgotten_first() -> None:
    memory = PromptMemory(SIZE, max_parents=4)
    old, other, new = [1, 1, 1], [2, 2, 2], [3, 3, 3]
    for prompt in (old, other, old, new, [4, 4, 4]):
        memory.meet(prompt, digests(prompt, str(prompt[0])), 0)
    assert memory.meet(new, digests(new, "3"), 0) == SeenPrefix(3, "repeated", 2)
    assert memory.meet(old, digests(old, "1"), 0) is None


def test_a_usage_tells_of_what_was_evicted_and_of_no_other_salt() -> None:
    scheduler = make(num_blocks=16)
    prompt = list(range(10, 22))
    told: list[SeenPrefix | None] = []
    for name, asked, salt in (
        ("first", prompt, "a"),
        ("stranger", prompt, "b"),
        ("flood", 60, "b"),
        ("evicted", [*prompt[:9], 99, 98, 97], "a"),
    ):
        scheduler.add(request(name, asked, max_tokens=1, salt=salt))
        told.append(drain(scheduler)[-1].usage.seen)
    assert told == [None, None, None, SeenPrefix(9, "broken", evicted_tokens=8)]
