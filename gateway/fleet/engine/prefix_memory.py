"""Remembers what an engine has probably cached: spans of prompts that this gateway has sent it
lately, by their keys (`engine.prefix_digests`), which no other tenant's prompt has.

It is a guess: the engine may have evicted them, and knows what other gateways have sent.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.lru import Lru

MAX_SPANS = 65_536
"""The bound on remembered spans: 8 bytes each, plus the mapping's overhead."""


class SentPrompt(NamedTuple):
    engine_id: str = ""
    """The engine's process that it went to."""
    sent_s: float = 0.0


class EarlierPrompt(NamedTuple):
    """The front of a prompt that was known when it was sent: so many tokens of it, in whole spans,
    and the engine's process that the last of them went to."""

    tokens: int = 0
    engine_id: str = ""


class PrefixMemory:
    """Keeps what was sent to one engine. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._known: Lru[int, SentPrompt] = Lru(MAX_SPANS)
        self._clock = clock

    @property
    def num_spans(self) -> int:
        return len(self._known)

    def sent(self, keys: Sequence[int], span_tokens: int, engine_id: str = "") -> EarlierPrompt:
        """Remember the prompt that has these keys."""
        before, goes_on = EarlierPrompt(), True
        prompt = SentPrompt(engine_id, self._clock())
        for key in keys:
            known = self._known.get(key) if goes_on else None
            if known is None:
                goes_on = False
            else:
                before = EarlierPrompt(before.tokens + span_tokens, known.engine_id)
            self._known.put(key, prompt)
        return before

    def spans_sent(
        self, keys: Sequence[int], first: int = 0, *, engine_id: str = "", within_s: float
    ) -> int:
        """Count the spans at a prompt's front that went to this process lately. `first`: so many of
        them are cached for certain. A span goes nowhere without those before it, so the last one
        is found by halving."""
        look, since_s = self._known.look, self._clock() - within_s

        def is_missing(key: int) -> bool:
            known = look(key)
            return known is None or known.engine_id != engine_id or known.sent_s < since_s

        if first >= len(keys) or is_missing(keys[first]):
            return first
        return bisect_left(keys, True, lo=first, key=is_missing)
