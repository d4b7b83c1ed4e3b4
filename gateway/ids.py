"""Server-made identifiers: UUIDv7 (RFC 9562, section 5.7). Time-ordered, so that indexes stay
local."""

from __future__ import annotations

import secrets
import time
from uuid import UUID


def uuid7() -> UUID:
    """48 bits of Unix milliseconds, 74 random bits, version 7, variant 10."""
    milliseconds = time.time_ns() // 1_000_000
    random_a, random_b = secrets.randbits(12), secrets.randbits(62)
    return UUID(
        int=(milliseconds & (2**48 - 1)) << 80 | 7 << 76 | random_a << 64 | 2 << 62 | random_b
    )
