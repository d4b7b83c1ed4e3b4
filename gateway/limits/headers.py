"""`x-ratelimit-*` as OpenAI's clients read them, `anthropic-ratelimit-*` as Anthropic's do.

Above: `errors`, `routes.reply`. Below: `verdicts`.
"""

from __future__ import annotations

import math
import time

from gateway.limits.verdicts import RateState


def to_duration(seconds: float) -> str:
    """`12ms`, `1s`, `1.5s`, `6m0s`, `2h0m1s`: Go's notation, rounded up to the millisecond."""
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
    """In both vendors' formats; a kind that nothing limits has none. OpenAI's clients read
    `x-ratelimit-remaining-tokens` and how long until it is full, Anthropic's
    `anthropic-ratelimit-tokens-remaining` and when (RFC 3339)."""
    headers = {}
    now_s = time.time()
    for kind, window in (
        ("requests", state.requests),
        ("tokens", state.tokens),
        ("input-tokens", state.input_tokens),
        ("output-tokens", state.output_tokens),
    ):
        if window is not None:
            limit, remaining = str(window.limit), str(window.remaining)
            headers[f"x-ratelimit-limit-{kind}"] = limit
            headers[f"x-ratelimit-remaining-{kind}"] = remaining
            headers[f"x-ratelimit-reset-{kind}"] = to_duration(window.reset_s)
            headers[f"anthropic-ratelimit-{kind}-limit"] = limit
            headers[f"anthropic-ratelimit-{kind}-remaining"] = remaining
            headers[f"anthropic-ratelimit-{kind}-reset"] = to_moment(now_s + window.reset_s)
    return headers


def to_moment(unix_s: float) -> str:
    """`2026-01-31T12:00:00Z`, rounded up to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(math.ceil(unix_s)))
