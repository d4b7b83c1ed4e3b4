"""`x-ratelimit-*` as OpenAI's clients read them. Above: `errors`, `routes.reply`. Below:
`verdicts`."""

from __future__ import annotations

import math

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
    """Six headers at most; a kind that nothing limits has none."""
    headers = {}
    for kind, window in (("requests", state.requests), ("tokens", state.tokens)):
        if window is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(window.limit)
            headers[f"x-ratelimit-remaining-{kind}"] = str(window.remaining)
            headers[f"x-ratelimit-reset-{kind}"] = to_duration(window.reset_s)
    return headers
