"""Measures what a gateway was asked for, as parts of limits. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from gateway.limits.redis.scope_limits import ScopeLimits
from gateway.principal import MINUTE_US

MAX_SCOPES = 4096
"""Scopes of which a gateway notes between two rounds what was asked for; others have what they
had."""
MAX_TOLD = 256
"""Scopes of which Postgres hears in a round, the ones that were asked for most."""
WORTH_TELLING = 0.05
"""A scope of whose limit no larger part is asked for keeps the shares of all that have none."""
LETTER_OF_STREAMS = "s"


class _ScopeDemand(msgspec.Struct):
    by_letter: dict[str, float]
    """The parts of each limit per minute; 1 is a minute of it."""
    running: int = 0
    refused_streams: int = 0
    max_streams: int = 0


class Demand:
    """Adds up what was asked for since the last round, by the keys of the scopes in Redis."""

    def __init__(self) -> None:
        self._asked: dict[str, _ScopeDemand] = {}

    def note(
        self, keys: Iterable[str], scopes: Iterable[ScopeLimits], units: Mapping[str, int]
    ) -> None:
        """Note what a request wants of its scopes, whose limits are those of plans. `units`: by
        the letters of buckets."""
        for key, scope in zip(keys, scopes, strict=True):
            if (found := self._of(key, scope)) is None:
                continue
            for bucket in scope.buckets:
                if bucket.window_us == MINUTE_US and bucket.limit:
                    before = found.by_letter.get(bucket.letter, 0.0)
                    more = units.get(bucket.letter, 0) / bucket.limit
                    found.by_letter[bucket.letter] = before + more

    def note_running(self, key: str, scope: ScopeLimits, *, is_refused: bool = False) -> None:
        """Note a request that holds one of a scope's streams now, or was refused one."""
        if scope.max_streams and (found := self._of(key, scope)) is not None:
            found.max_streams = scope.max_streams
            found.refused_streams += is_refused
            found.running += not is_refused

    def _of(self, key: str, scope: ScopeLimits) -> _ScopeDemand | None:
        found = self._asked.get(key)
        if found is None and len(self._asked) < MAX_SCOPES:
            found = self._asked[key] = _ScopeDemand({})
        return found

    def take(self, elapsed_s: float, known: Iterable[str]) -> dict[str, float]:
        """Return what Postgres is to hear, in minutes of the limit of each scope, and begin anew.
        `known`: scopes that have shares of their own, of which anything is told."""
        minutes, found = max(elapsed_s, 0.001) / 60, dict[str, float]()
        has_shares = frozenset(known)
        for key, each in self._asked.items():
            asked = max(each.by_letter.values(), default=0.0)
            if each.max_streams:
                of_streams = (each.running + each.refused_streams) / each.max_streams
                asked = max(asked, of_streams * minutes)
            if asked >= WORTH_TELLING * minutes or (asked and key in has_shares):
                found[key] = asked
        self._asked = {}
        most = sorted(found, key=lambda key: (-found[key], key))[:MAX_TOLD]
        return {key: found[key] for key in sorted(most)}


class DemandRates:
    """How much of its limit each cell is asked for of each scope, smoothed over the last rounds,
    by the sums that Postgres has."""

    KEPT = 0.5
    """The worth of the rate so far beside that of the last round."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], float] = {}
        self._rates: dict[tuple[str, str], float] = {}
        self._at: float | None = None

    def note(self, sums: Mapping[tuple[str, str], float], at: float) -> None:
        """Note the sums of a round, by scope and cell. `at`: seconds of Postgres' clock."""
        before_at, self._at = self._at, at
        rates: dict[tuple[str, str], float] = {}
        if before_at is not None and at > before_at:
            for key, asked in sums.items():
                # Of a first one the rate is not known yet: all that it was ever asked for.
                more = max(0.0, asked - self._sums.get(key, 0.0)) * 60 / (at - before_at)
                known = self._rates.get(key)
                rates[key] = more if known is None else self.KEPT * known + (1 - self.KEPT) * more
        self._sums, self._rates = dict(sums), rates

    def of(self, scope: str, cells: Iterable[str]) -> dict[str, float]:
        return {cell: self._rates.get((scope, cell), 0.0) for cell in cells}
