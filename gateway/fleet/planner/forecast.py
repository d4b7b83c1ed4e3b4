"""Forecasts the rate at which requests come: by its trend (Holt's linear method) and by the same
minute of the days before.

Pure. Both are exponential averages by time constants, so that observations may come at any
distance. The day's shape is learnt minute by minute, and says only by what factor the rate changes
until then: what today has in common with other days is its shape, not its height. The time
constants of level and trend were found by simulation (`python -m bench.fleet planner`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

DAY_MINUTES = 24 * 60
LEVEL_S = 12.0
"""The time constant of the rate as it is now."""
TREND_S = 45.0
"""The time constant of its slope."""
PROFILE_DAYS = 3.0
"""The time constant of the day's shape, in days."""
MOST_GROWTH = 4.0
"""The day's shape multiplies the rate by so much at most."""
SMOOTHED_MINUTES = 5
"""A minute of the day is looked at together with so many before and behind it."""
MIN_KNOWN = 0.5
"""Minutes around one that have to be known for the shape to count, as a share of them."""


class Forecast:
    """The rate of one model. Times are Unix seconds, rates are per second."""

    def __init__(self, profile: Sequence[float] = ()) -> None:
        """`profile`: of a process before, by minute of the day (UTC), -1 where nothing is known."""
        known = len(profile) == DAY_MINUTES
        self.profile = list(profile) if known else [-1.0] * DAY_MINUTES
        self.level = self.trend = 0.0
        self._minute = -1
        self._minute_sum = self._minute_s = 0.0
        self._is_first = True

    def observe(self, now_s: float, rate: float, interval_s: float) -> None:
        """Take in the rate of the last `interval_s` seconds."""
        self._learn_minute(now_s, rate, interval_s)
        if self._is_first:
            self.level, self._is_first = rate, False
            return
        before = self.level
        expected = max(0.0, before + self.trend * interval_s)
        self.level = expected + (rate - expected) * (1 - math.exp(-interval_s / LEVEL_S))
        slope = (self.level - before) / interval_s
        self.trend += (slope - self.trend) * (1 - math.exp(-interval_s / TREND_S))

    def at(self, now_s: float, ahead_s: float) -> float:
        """Return the rate expected so long after now, never less than the one now: whoever takes
        engines away waits for the load to be gone."""
        trended = self.level + max(0.0, self.trend) * ahead_s
        return max(self.level, trended, self.level * self.growth(now_s, ahead_s))

    def growth(self, now_s: float, ahead_s: float) -> float:
        """Return the factor by which the rate grew on other days between these minutes; 1.0 where
        they are not known."""
        before, then = self.usual(now_s), self.usual(now_s + ahead_s)
        if before is None or then is None or before <= 0:
            return 1.0
        return min(MOST_GROWTH, then / before)

    def usual(self, when_s: float) -> float | None:
        """Return the rate at that minute of other days; None: nobody knows."""
        middle = int(when_s // 60) % DAY_MINUTES
        around = range(middle - SMOOTHED_MINUTES, middle + SMOOTHED_MINUTES + 1)
        known = [self.profile[at % DAY_MINUTES] for at in around]
        known = [each for each in known if each >= 0]
        if len(known) < MIN_KNOWN * len(around):
            return None
        return sum(known) / len(known)

    def _learn_minute(self, now_s: float, rate: float, interval_s: float) -> None:
        minute = int(now_s // 60) % DAY_MINUTES
        if minute != self._minute:
            if self._minute >= 0 and self._minute_s > 0:
                self._put(self._minute, self._minute_sum / self._minute_s)
            self._minute, self._minute_sum, self._minute_s = minute, 0.0, 0.0
        self._minute_sum += rate * interval_s
        self._minute_s += interval_s

    def _put(self, minute: int, rate: float) -> None:
        before = self.profile[minute]
        new = rate if before < 0 else before + (rate - before) / PROFILE_DAYS
        self.profile[minute] = new
