"""Decides when a delivery is tried again, and when it is given up. Pure. Exponential from 5 seconds
to 3 hours, spread by a fifth, for a day: some fourteen attempts."""

from __future__ import annotations

from collections.abc import Callable

LIFETIME_S = 24 * 3600.0
"""From the event, or from the last time that somebody asked for it, to when it is given up."""
FIRST_DELAY_S = 5.0
GROWTH = 3.0
MAX_DELAY_S = 3 * 3600.0
SPREAD = 0.2
MAX_RETRY_AFTER_S = 3600.0
"""So long a receiver may put us off at a time."""
MAX_EXPONENT = 16


def delay_s(attempts: int, retry_after: str | None, draw: Callable[[float, float], float]) -> float:
    """Return the seconds until the next attempt. `retry_after`: the header's text, if there was
    one; a date in it is ignored. `draw`: evenly between two numbers."""
    assert attempts > 0
    exponent = min(attempts - 1, MAX_EXPONENT)
    found = min(FIRST_DELAY_S * GROWTH**exponent, MAX_DELAY_S)
    found *= draw(1 - SPREAD, 1 + SPREAD)
    if retry_after is not None and retry_after.isascii() and retry_after.isdigit():
        found = max(found, min(float(retry_after[:9]), MAX_RETRY_AFTER_S))
    return found
