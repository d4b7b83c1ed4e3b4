"""Computes what a request takes from its scopes, bounded, and as the scripts are told.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.limits.outcomes import Admission, Units
from gateway.limits.redis.keys import scope_keys
from gateway.limits.redis.scope_limits import BucketLimit, ScopeLimits

MAX_TOKENS = 100_000_000
"""Of one request: keeps Lua's arithmetic exact (10^8 x 60 s in microseconds < 2^53). More, which
only an upstream's own count may claim, stands for this many."""


def reservation(scopes: Sequence[ScopeLimits], input_tokens: int, output_tokens: int) -> Units:
    """Return what a request reserves: what it is expected to write never makes it too large for its
    limits, only its input does."""
    for scope in scopes:
        for bucket in scope.buckets:
            if bucket.kind in "td":
                output_tokens = min(output_tokens, bucket.limit - input_tokens)
            elif bucket.kind == "o":
                output_tokens = min(output_tokens, bucket.limit)
    return bounded(Units(input_tokens=input_tokens, output_tokens=max(0, output_tokens)))


def bounded(used: Units) -> Units:
    if used.tokens <= MAX_TOKENS:
        return used
    input_tokens = min(used.input_tokens, MAX_TOKENS)
    return Units(
        input_tokens=input_tokens,
        output_tokens=MAX_TOKENS - input_tokens,
        cost_nano=used.cost_nano,
    )


def to_script(scope: ScopeLimits) -> tuple[int, Sequence[Any]]:
    return (-1 if scope.max_streams is None else scope.max_streams, scope.buckets)


def to_charges(admission: Admission) -> list[tuple[str, list[BucketLimit]]]:
    """Return the charges of a lease that must be opened again."""
    keys = scope_keys(admission.org_id, admission.scopes)
    return [
        (key, [bucket for bucket in scope.buckets if bucket.limit])
        for key, scope in zip(keys, admission.scopes, strict=True)
    ]
