"""Server-made identifiers: UUIDv7 (RFC 9562, section 5.7). Time-ordered, so that indexes stay
local."""

from __future__ import annotations

import os
import time
from collections import deque
from uuid import UUID

RANDOM_BYTES = 10
DRAWN_AT_A_TIME = 256
"""Identifiers' worth of randomness: asking the system for it takes longer than all else here."""

_drawn: deque[bytes] = deque()


def uuid7() -> UUID:
    return UUID(int=_draw())


def uuid7_hex() -> str:
    """Return the 32 digits of a UUIDv7. An object of it takes longer to make than to draw."""
    return f"{_draw():032x}"


def uuid7_text() -> str:
    """Return a UUIDv7 as RFC 9562 writes it."""
    digits = uuid7_hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _draw() -> int:
    """Draw an id: 48 bits of Unix milliseconds, 74 random bits, version 7, variant 10."""
    milliseconds = time.time_ns() // 1_000_000
    bits = int.from_bytes(_random())
    random_a, random_b = bits >> 68, bits & (2**62 - 1)
    return (milliseconds & (2**48 - 1)) << 80 | 7 << 76 | random_a << 64 | 2 << 62 | random_b


def _random() -> bytes:
    """Return random bits, each given out once.

    A forked process begins anew: it must not repeat its parent's.
    """
    try:
        return _drawn.popleft()
    except IndexError:
        drawn = os.urandom(RANDOM_BYTES * DRAWN_AT_A_TIME)
        _drawn.extend(
            drawn[at : at + RANDOM_BYTES] for at in range(RANDOM_BYTES, len(drawn), RANDOM_BYTES)
        )
        return drawn[:RANDOM_BYTES]


os.register_at_fork(after_in_child=_drawn.clear)
