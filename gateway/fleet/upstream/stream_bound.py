"""Bounds a stream in bytes and in time, whatever it holds: comments, blank lines, chunks without
text, fields around the text. `answer_bound` is about what the model wrote.

Pure but for its clock; one for each stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.fleet.upstream.meter import BrokenAnswer, UpstreamMeter

IDLE_TIMEOUT_S = 120.0
"""Bounds the time between two reads of a stream, the first included."""
SILENCE_S = 600.0
"""Bounds the time without a byte of text, from the head on: an answer in one piece may take as
long. A model that thinks unseen sends signs of life."""
END_S = 10.0
"""Bounds the time from the last choice's end to the usage and `[DONE]`: the client has its answer.
"""
LEAST_BYTES = 4 * 1024 * 1024
"""A stream that may write a single token may have this many bytes; one event may be as large."""
BYTES_PER_TOKEN = 16 * 1024
"""A token's chunk has some 300 bytes, with the 20 likeliest beside it some 4,000."""


class StreamBound:
    """`most_tokens`: what it was told to write, and what it repeats."""

    def __init__(self, most_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes = LEAST_BYTES + BYTES_PER_TOKEN * most_tokens
        self._clock = clock
        self._num_bytes = self._num_texts = 0
        self._text_at = clock()
        self._ended_at: float | None = None

    def note(self, num_bytes: int, meter: UpstreamMeter) -> None:
        """Note what a read brought, once `meter` has read it. Raises BrokenAnswer, for a stream
        that is too long around its text, or silent for too long."""
        now = self._clock()
        self._num_bytes += num_bytes
        if meter.num_texts != self._num_texts:
            self._num_texts, self._text_at = meter.num_texts, now
        if self._ended_at is None and meter.complete:
            self._ended_at = now
        if self._num_bytes > self._most_bytes:
            raise BrokenAnswer(f"a stream of more than {self._most_bytes} bytes")
        if now - self._text_at > SILENCE_S:
            raise BrokenAnswer(f"no text for {SILENCE_S:.0f} s")

    @property
    def is_over(self) -> bool:
        """Tell whether all choices ended so long ago that nothing is waited for any more."""
        return self._ended_at is not None and self._clock() - self._ended_at >= END_S

    @property
    def read_s(self) -> float:
        """Return how long the next read may take."""
        if self._ended_at is None:
            return IDLE_TIMEOUT_S
        return max(0.0, min(IDLE_TIMEOUT_S, self._ended_at + END_S - self._clock()))
