"""Writes `x-ratelimit-*` as OpenAI's clients read them, `anthropic-ratelimit-*` as Anthropic's
do."""

from __future__ import annotations

import math
import time
from functools import lru_cache

from gateway.limits.outcomes import SHOWN, RateState

PARTS = ("limit", "remaining", "reset")
NAMES = {
    kind: (
        *(f"x-ratelimit-{part}-{kind.replace('_', '-')}" for part in PARTS),
        *(f"anthropic-ratelimit-{kind.replace('_', '-')}-{part}" for part in PARTS),
    )
    for kind in SHOWN.values()
}
MAX_MOMENTS = 256
"""At most this many moments are remembered: most buckets are full within the same few seconds."""


def to_duration(seconds: float) -> str:
    """Write seconds in Go's notation, `12ms`, `1s`, `1.5s`, `6m0s`, `2h0m1s`, rounded up to the
    millisecond."""
    total_ms = max(0, math.ceil(round(seconds * 1000, 6)))
    if total_ms < 1000:
        return f"{total_ms}ms" if total_ms else "0s"
    minutes, rest_ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    last = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{last}"
    return f"{minutes}m{last}" if minutes else last


def to_headers(state: RateState) -> dict[str, str]:
    """Return the headers in both vendors' formats; a kind that nothing limits has none. OpenAI's
    clients read `x-ratelimit-remaining-tokens` and how long until it is full, Anthropic's
    `anthropic-ratelimit-tokens-remaining` and when (RFC 3339)."""
    headers: dict[str, str] = {}
    now_s = time.time()
    for kind, window in state.items():
        limit, remaining = str(window.limit), str(window.remaining)
        resets = to_duration(window.reset_s), to_moment(math.ceil(now_s + window.reset_s))
        values = (limit, remaining, resets[0], limit, remaining, resets[1])
        headers.update(zip(NAMES[kind], values, strict=True))
    return headers


@lru_cache(MAX_MOMENTS)
def to_moment(unix_s: int) -> str:
    """Write a moment as `2026-01-31T12:00:00Z`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))
