"""Decides what one gateway may let pass by itself while Redis is away.

It knows no Redis. Of N gateways each has its share, limit / N, of which SHARE is used, and its
buckets hold a quarter of what that share's burst would be: whatever the others do, and however
empty the buckets in Redis were when it went away, all of them together let pass at most a fifth of
a burst and SHARE of the rate beyond that.

Redis, meanwhile, refills its buckets as if nobody used anything. So what is posted when it is back
is not only what is missing here: a bucket that was empty when Redis went away has refilled from
what was used here all the same. How full it was nobody knows, so each gateway takes it that its
share of it was empty, and posts what would be missing of that share by now; never more than it let
pass.

A lease here lives as long as its request: a gateway that dies takes its buckets along.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import msgspec

from gateway.limits.redis.scope_limits import BucketLimit, ScopeLimits
from gateway.lru import Lru

SHARE = 0.8
BURST_PARTS = 4
MAX_SCOPES = 16_384
"""How many scopes have local buckets."""
UNKNOWN_S = 1.0
"""Until a stream ends, which nobody knows."""


class LocalRefusal(msgspec.Struct, frozen=True):
    place: int
    """The index of the scope."""
    letter: str
    wait_s: float
    """Infinity: for ever."""


class LocalGrant(msgspec.Struct, frozen=True):
    """The part that is still missing of one bucket: as much must be taken in Redis."""

    bucket: BucketLimit
    least: int
    """The deficit of the local bucket, which began full."""
    most: int
    """The deficit of its share of the bucket in Redis, had that begun empty."""
    passed: int
    """All of which this is what has not refilled."""


class _Bucket(msgspec.Struct):
    limit: BucketLimit
    per_s: float = 0.0
    """Units, of this gateway's share."""
    rate: float = 0.0
    """The rate of use."""
    capacity: float = 0.0
    full_s: float = 0.0
    """How long the one in Redis takes to fill."""
    full_at: float = 0.0
    passed: int = 0
    """Units that Redis knows nothing of."""
    owed_until: float = 0.0
    """When the share of the bucket in Redis would be full, had it been empty then."""


Clock = Callable[[], float]


class LocalBuckets:
    """The buckets that one gateway keeps while Redis is away. `clock`: monotonic seconds. Scopes
    are known by their keys in Redis. With a `share` of 1 and one of `burst_parts`, who is alone
    lets pass what Redis would."""

    def __init__(
        self, clock: Clock = time.monotonic, *, share: float = SHARE, burst_parts: int = BURST_PARTS
    ) -> None:
        self._num_gateways = 1
        self._share, self._burst_parts = share, burst_parts
        self._clock = clock
        self._away_since = clock()
        self._scopes: Lru[str, dict[str, _Bucket]] = Lru(MAX_SCOPES)
        """By their keys."""
        self._streams: dict[str, int] = {}

    @property
    def num_gateways(self) -> int:
        return self._num_gateways

    @num_gateways.setter
    def num_gateways(self, number: int) -> None:
        if number != self._num_gateways:
            self._num_gateways = number
            for buckets in self._scopes.values():
                for bucket in buckets.values():
                    self._share_out(bucket)

    def begins(self) -> None:
        """Note that Redis is away from now on."""
        self._away_since = self._clock()
        for buckets in self._scopes.values():
            for bucket in buckets.values():
                bucket.passed, bucket.owed_until = 0, 0.0

    def admit(
        self, keys: Sequence[str], scopes: Sequence[ScopeLimits], units: dict[str, int]
    ) -> LocalRefusal | None:
        """Take from all or from none."""
        now = self._clock()
        found = [self._buckets_of(key, scope) for key, scope in zip(keys, scopes, strict=True)]
        for place, buckets in enumerate(found):
            waits = self._wait_for_stream_s(keys[place], scopes[place].max_streams) > 0
            for bucket in buckets:
                waits = waits or self._wait_s(bucket, units, now) > 0
            if waits:
                return self._refusal(keys, scopes, found, units, now)
        for key, buckets in zip(keys, found, strict=True):
            self._streams[key] = self._streams.get(key, 0) + 1
            for bucket in buckets:
                self._take(bucket, units[bucket.limit.letter], now)
        return None

    def settle(
        self,
        keys: Sequence[str],
        scopes: Sequence[ScopeLimits],
        taken: dict[str, int],
        used: dict[str, int],
    ) -> None:
        """The end of what `admit` let pass with `taken`. `used` is as much where Redis is told of
        the difference."""
        now = self._clock()
        for key, scope in zip(keys, scopes, strict=True):
            left = self._streams.get(key, 1) - 1
            self._streams[key] = left
            if not left:
                del self._streams[key]
            for bucket in self._buckets_of(key, scope):
                letter = bucket.limit.letter
                self._take(bucket, used[letter] - taken[letter], now)

    def grants(self) -> dict[str, list[LocalGrant]]:
        """Return, by scope key, what was let pass and has not refilled since Redis went away."""
        now = self._clock()
        found: dict[str, list[LocalGrant]] = {}
        for key, buckets in self._scopes.items():
            for bucket in buckets.values():
                missing = round((bucket.full_at - now) * bucket.rate)
                owed = round((bucket.owed_until - now) * bucket.per_s)
                least, most = (min(bucket.passed, each) for each in (missing, max(missing, owed)))
                if most > 0:
                    grant = LocalGrant(bucket.limit, max(0, least), most, bucket.passed)
                    found.setdefault(key, []).append(grant)
        return found

    def taken(self, key: str, grants: Sequence[LocalGrant]) -> None:
        """Note that Redis has these now. What may pass here is no more for that."""
        buckets = self._scopes.get(key) or {}
        for grant in grants:
            bucket = buckets.get(grant.bucket.letter)
            if bucket is not None:
                bucket.passed -= grant.passed

    def _refusal(
        self,
        keys: Sequence[str],
        scopes: Sequence[ScopeLimits],
        found: Sequence[Sequence[_Bucket]],
        units: dict[str, int],
        now: float,
    ) -> LocalRefusal:
        """The longest wait, where there is one; the first that never ends, where there is."""
        waits: list[LocalRefusal] = []
        for place, buckets in enumerate(found):
            for bucket in buckets:
                wait_s = self._wait_s(bucket, units, now)
                waits.append(LocalRefusal(place, bucket.limit.letter, wait_s))
            wait_s = self._wait_for_stream_s(keys[place], scopes[place].max_streams)
            waits.append(LocalRefusal(place, "s", wait_s))
        return max(waits, key=lambda each: each.wait_s)

    def _buckets_of(self, key: str, scope: ScopeLimits) -> list[_Bucket]:
        """Return the scope's buckets, in its order. One whose limit was changed keeps what was
        taken of it."""
        known = self._scopes.get(key)
        if known is None:
            known = {}
            self._scopes.put(key, known)
        found = []
        for limit in scope.buckets:
            bucket = known.get(limit.letter)
            if bucket is None or (bucket.limit is not limit and bucket.limit != limit):
                bucket = known.setdefault(limit.letter, _Bucket(limit))
                bucket.limit = limit
                self._share_out(bucket)
            found.append(bucket)
        return found

    def _share_out(self, bucket: _Bucket) -> None:
        limit, num_gateways = bucket.limit, max(1, self._num_gateways)
        whole = limit.limit / (limit.window_us / 1_000_000)
        bucket.per_s = whole / num_gateways
        bucket.rate = self._share * bucket.per_s
        bucket.capacity = limit.burst * self._share / num_gateways / self._burst_parts
        bucket.full_s = limit.burst / whole if whole else 0.0

    def _wait_s(self, bucket: _Bucket, units: dict[str, int], now: float) -> float:
        """Return how long a bucket must wait, as in `admit.lua`: more than the bucket holds needs a
        full one, and leaves debt. Infinity where nothing helps."""
        asked = units[bucket.limit.letter]
        if asked == 0:
            return 0.0
        if asked > bucket.limit.limit:
            return math.inf
        over = asked - bucket.capacity
        wait_s = bucket.full_at - now
        if over < 0:
            wait_s += over / bucket.rate
        return wait_s if wait_s > 0 else 0.0

    def _wait_for_stream_s(self, key: str, max_streams: int | None) -> float:
        """Return how long another stream must wait; at least one is let in, so that a small limit
        lets something pass."""
        if max_streams is None:
            return 0.0
        if max_streams == 0:
            return math.inf
        most = max(1, int(max_streams * self._share / max(1, self._num_gateways)))
        return 0.0 if self._streams.get(key, 0) < most else UNKNOWN_S

    def _take(self, bucket: _Bucket, units: int, now: float) -> None:
        if not units or not bucket.rate:
            return
        full_at = (bucket.full_at if bucket.full_at > now else now) + units / bucket.rate
        bucket.full_at = full_at if full_at > now else now
        bucket.passed += units
        since = max(now, self._away_since + bucket.full_s, bucket.owed_until)
        bucket.owed_until = since + units / bucket.per_s
