"""What one gateway may let pass by itself while Redis is away.

Above: `limiter`. Below: `verdicts`. It knows no Redis. Of N gateways each has its share, limit / N,
of which SHARE is used, and its buckets hold a quarter of what that share's burst would be: whatever
the others do, and however empty the buckets in Redis were when it went away, all of them together
let pass at most a fifth of a burst and SHARE of the rate beyond that.

Redis, meanwhile, refills its buckets as if nobody used anything. So what is posted when it is back
is not only what is missing here: a bucket that was empty when Redis went away has refilled from
what was used here all the same. How full it was nobody knows, so each gateway takes it that its
share of it was empty, and posts what would be missing of that share by now; never more than it let
pass.

A lease here lives as long as its request: a gateway that dies takes its buckets along.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from gateway.limits.verdicts import BucketLimit, ScopeLimits, UnitKind
from gateway.lru import Lru

SHARE = 0.8
BURST_PARTS = 4
MAX_BUCKETS = 65_536
UNKNOWN_S = 1.0
"""Until a stream ends, which nobody knows."""


class LocalRefusal(msgspec.Struct, frozen=True):
    place: int
    """Of the scope."""
    kind: str
    wait_s: float | None
    """None: for ever."""


class Grant(msgspec.Struct, frozen=True):
    """What is still missing of one bucket: as much must be taken in Redis."""

    bucket: BucketLimit
    least: int
    """Of the bucket here, which was full."""
    most: int
    """Of its share of the bucket in Redis, had that been empty."""
    passed: int
    """All of which this is what has not refilled."""


class _Bucket(msgspec.Struct):
    limit: BucketLimit
    full_at: float = 0.0
    passed: int = 0
    """Units that Redis knows nothing of."""
    owed_until: float = 0.0
    """When the share of the bucket in Redis would be full, had it been empty then."""


Clock = Callable[[], float]


class LocalBuckets:
    """`clock`: monotonic seconds. Scopes are known by their keys in Redis. With a `share` of 1 and
    one of `burst_parts`, who is alone lets pass what Redis would."""

    def __init__(
        self, clock: Clock = time.monotonic, *, share: float = SHARE, burst_parts: int = BURST_PARTS
    ) -> None:
        self.num_gateways = 1
        self._share, self._burst_parts = share, burst_parts
        self._clock = clock
        self._away_since = clock()
        self._buckets: Lru[tuple[str, str], _Bucket] = Lru(MAX_BUCKETS)
        self._streams: dict[str, int] = {}

    def begins(self) -> None:
        """Redis is away from now on."""
        self._away_since = self._clock()
        for bucket in self._buckets.values():
            bucket.passed, bucket.owed_until = 0, 0.0

    def admit(
        self, keys: Sequence[str], scopes: Sequence[ScopeLimits], units: dict[UnitKind, int]
    ) -> LocalRefusal | None:
        """Take from all or from none."""
        refusal: LocalRefusal | None = None
        for place, (key, scope) in enumerate(zip(keys, scopes, strict=True)):
            waits: list[tuple[str, float | None]] = [
                (b.kind, self._wait_s(key, b, units[b.kind])) for b in scope.buckets
            ]
            waits.append(("s", self._wait_for_stream_s(key, scope.max_streams)))
            for kind, wait_s in waits:
                if wait_s is None:
                    return LocalRefusal(place, kind, None)
                if wait_s > 0 and (refusal is None or wait_s > (refusal.wait_s or 0)):
                    refusal = LocalRefusal(place, kind, wait_s)
        if refusal is None:
            for key, scope in zip(keys, scopes, strict=True):
                self._streams[key] = self._streams.get(key, 0) + 1
                for bucket in scope.buckets:
                    self._take(key, bucket, units[bucket.kind])
        return refusal

    def settle(
        self,
        keys: Sequence[str],
        scopes: Sequence[ScopeLimits],
        taken: dict[UnitKind, int],
        used: dict[UnitKind, int],
    ) -> None:
        """The end of what `admit` let pass with `taken`. `used` is as much where Redis is told of
        the difference."""
        for key, scope in zip(keys, scopes, strict=True):
            left = self._streams.get(key, 1) - 1
            self._streams[key] = left
            if not left:
                del self._streams[key]
            for bucket in scope.buckets:
                self._take(key, bucket, used[bucket.kind] - taken[bucket.kind])

    def grants(self) -> dict[str, list[Grant]]:
        """By scope key, what was let pass and has not refilled since Redis went away."""
        now = self._clock()
        found: dict[str, list[Grant]] = {}
        for (key, _), bucket in self._buckets.items():
            missing = round((bucket.full_at - now) * self._rate(bucket.limit))
            owed = round((bucket.owed_until - now) * self._whole_rate(bucket.limit))
            least, most = (min(bucket.passed, each) for each in (missing, max(missing, owed)))
            if most > 0:
                grant = Grant(bucket.limit, max(0, least), most, bucket.passed)
                found.setdefault(key, []).append(grant)
        return found

    def taken(self, key: str, grants: Sequence[Grant]) -> None:
        """Redis has these now. What may pass here is no more for that."""
        for grant in grants:
            bucket = self._buckets.get((key, grant.bucket.kind))
            if bucket is not None:
                bucket.passed -= grant.passed

    def _rate(self, bucket: BucketLimit) -> float:
        """Units per second."""
        return self._share * self._whole_rate(bucket)

    def _whole_rate(self, bucket: BucketLimit) -> float:
        """Of this gateway's share, of which `SHARE` is used."""
        return bucket.limit / max(1, self.num_gateways) / (bucket.window_us / 1_000_000)

    def _capacity(self, bucket: BucketLimit) -> float:
        return bucket.burst * self._share / max(1, self.num_gateways) / self._burst_parts

    def _wait_s(self, key: str, bucket: BucketLimit, units: int) -> float | None:
        """As in `admit.lua`: more than the bucket holds needs a full one, and leaves debt."""
        if units == 0:
            return 0.0
        if units > bucket.limit:
            return None
        known = self._buckets.get((key, bucket.kind))
        deficit_s = max(0.0, known.full_at - self._clock()) if known is not None else 0.0
        over = units - self._capacity(bucket)
        return deficit_s if over >= 0 else max(0.0, deficit_s + over / self._rate(bucket))

    def _wait_for_stream_s(self, key: str, max_streams: int | None) -> float | None:
        """At least one, so that a small limit lets something pass."""
        if max_streams is None:
            return 0.0
        if max_streams == 0:
            return None
        most = max(1, int(max_streams * self._share / max(1, self.num_gateways)))
        return 0.0 if self._streams.get(key, 0) < most else UNKNOWN_S

    def _take(self, key: str, limit: BucketLimit, units: int) -> None:
        if not limit.limit or not units:
            return
        now, place = self._clock(), (key, limit.kind)
        bucket = self._buckets.get(place)
        if bucket is None or bucket.limit != limit:
            full_at = bucket.full_at if bucket is not None else 0.0
            bucket = _Bucket(limit, full_at)
            self._buckets.put(place, bucket)
        bucket.full_at = max(now, max(now, bucket.full_at) + units / self._rate(limit))
        bucket.passed += units
        emptied = self._away_since + limit.burst / (limit.limit / (limit.window_us / 1_000_000))
        since = max(now, emptied, bucket.owed_until)
        bucket.owed_until = since + units / self._whole_rate(limit)
