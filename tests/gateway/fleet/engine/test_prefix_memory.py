"""A prompt that was sent lately is probably cached, and only for whom it was sent."""

from __future__ import annotations

import random

import pytest

from gateway.fleet.engine import prefix_memory
from gateway.fleet.engine.prefix_memory import CHUNK_TOKENS, PrefixMemory
from gateway.lru import Lru

RANDOM = random.Random(1)
PROMPT = [RANDOM.randrange(2**17) for _ in range(10 * CHUNK_TOKENS)]


def test_a_common_front_counts_in_whole_chunks() -> None:
    memory = PrefixMemory()
    assert memory.cached_tokens("a", PROMPT) == 0
    memory.sent("a", PROMPT)
    assert memory.cached_tokens("a", PROMPT) == len(PROMPT) - 1, "one is always computed"
    longer = [*PROMPT, *range(500)]
    assert memory.cached_tokens("a", longer) == len(PROMPT)
    changed = [*PROMPT[: 3 * CHUNK_TOKENS + 5], 0, *PROMPT[3 * CHUNK_TOKENS + 6 :]]
    assert memory.cached_tokens("a", changed) == 3 * CHUNK_TOKENS
    assert memory.cached_tokens("a", PROMPT[1:]) == 0
    assert memory.cached_tokens("b", PROMPT) == 0, "another tenant's"
    assert memory.cached_tokens("a", []) == 0


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_memory, "MAX_CHUNKS", 4)
    memory = PrefixMemory()
    memory.sent("a", PROMPT)
    assert isinstance(memory._known, Lru) and len(memory._known) == 4
    assert memory.cached_tokens("a", PROMPT) == 0, "its front was forgotten first"
