"""A prompt that was sent lately is probably cached, and only by the process that it went to."""

from __future__ import annotations

import math

import pytest

from gateway.fleet.engine import prefix_memory
from gateway.fleet.engine.prefix_memory import EarlierPrompt, PrefixMemory

PROMPT = [*range(100, 110)]
"""The keys of ten spans."""


def test_a_common_front_counts_in_whole_spans() -> None:
    memory = PrefixMemory()

    def spans(keys: list[int], first: int = 0) -> int:
        return memory.spans_sent(keys, first, engine_id="e", within_s=math.inf)

    assert spans(PROMPT) == 0
    assert memory.sent(PROMPT, 128, "e") == EarlierPrompt()
    assert spans(PROMPT) == 10
    assert spans([*PROMPT, 5]) == 10
    assert spans([*PROMPT[:3], 5, 6, 7]) == 3
    assert spans([5, 6, *PROMPT[2:]], first=2) == 10, "what is cached for certain need not be sent"
    assert spans(PROMPT[1:]) == 9, "a key stands for all of the text before it"
    assert spans([]) == 0
    assert memory.sent([*PROMPT[:3], 5], 128, "f") == EarlierPrompt(384, "e")


def test_what_went_to_another_process_or_long_ago_does_not_count() -> None:
    now = 100.0
    memory = PrefixMemory(clock=lambda: now)
    memory.sent(PROMPT, 128, "e")
    assert memory.spans_sent(PROMPT, engine_id="f", within_s=math.inf) == 0
    now = 111.0
    memory.sent(PROMPT[:4], 128, "e")
    assert memory.spans_sent(PROMPT, engine_id="e", within_s=10.0) == 4
    assert memory.spans_sent(PROMPT, engine_id="e", within_s=12.0) == 10


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_memory, "MAX_SPANS", 4)
    memory = PrefixMemory()
    memory.sent(PROMPT, 128)
    assert len(memory._known) == 4
    assert memory.spans_sent(PROMPT, within_s=math.inf) == 0, "its front was forgotten first"
