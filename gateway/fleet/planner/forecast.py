"""Forecasts the rate at which requests come: by how many came lately and their trend, and by the
same minute of the days before.

Pure. The rate now is measured over as long as it has been the same, three minutes at most: it is
looked each time whether so many less or more came lately than before that it is no accident, and
then what was before is forgotten. So a rate that stays is known precisely, and one that jumps is
followed at once. A trend counts by as much as it is larger than accident makes it look. How much
accident there is, is learnt: requests that come in bunches vary more than those that come alone.

The day's shape is learnt minute by minute, and says only by what factor the rate changes until
then: what today has in common with other days is its shape, not its height.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

DAY_MINUTES = 24 * 60
WINDOW_S = 180.0
"""The rate now is measured over so long at most."""
BUCKET_S = 1.0
"""Looks that are closer than this count as one."""
TREND_FROM_S = 30.0
"""A line through less says nothing of what comes."""
CHANGED = 16.0
"""Twice the logarithm of how much likelier two rates have to be than one: four standard deviations.
There are many moments at which it may have changed, and each look tries all of them."""
BUNCHES_S = 900.0
"""The time constant of how much requests come in bunches."""
MOST_BUNCHED = 9.0
"""A jump of the rate counts as no larger accident than this."""
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
        self._came: deque[tuple[float, float]] = deque()
        """For how many seconds how many came, since the rate changed last."""
        self._bunched = 1.0
        """The variance of how many come, over their mean: 1 where each comes by itself."""
        self._minute = -1
        self._minute_sum = self._minute_s = 0.0

    def observe(self, now_s: float, rate: float, interval_s: float) -> None:
        """Take in the rate of the last `interval_s` seconds."""
        self._learn_minute(now_s, rate, interval_s)
        self._learn_bunches(rate, interval_s)
        if self._came and self._came[-1][0] + interval_s <= BUCKET_S:
            seconds, number = self._came.pop()
            self._came.append((seconds + interval_s, number + rate * interval_s))
        else:
            self._came.append((interval_s, rate * interval_s))
        while len(self._came) > 1 and self._seconds() - self._came[0][0] >= WINDOW_S:
            self._came.popleft()
        self._forget_another_rate()
        self._fit()

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

    def _seconds(self) -> float:
        return sum(seconds for seconds, _ in self._came)

    def _learn_bunches(self, rate: float, interval_s: float) -> None:
        expected = max(0.0, self.level + self.trend * interval_s / 2) * interval_s
        if expected <= 0:
            return
        seen = min(MOST_BUNCHED, (rate * interval_s - expected) ** 2 / expected)
        self._bunched += (seen - self._bunched) * (1 - math.exp(-interval_s / BUNCHES_S))

    def _forget_another_rate(self) -> None:
        """Keep only what came since the rate changed, if it did."""
        seconds, number = self._seconds(), sum(each for _, each in self._came)
        late_s = late = best = 0.0
        keep = len(self._came)
        for kept, (each_s, each) in enumerate(reversed(self._came), start=1):
            late_s, late = late_s + each_s, late + each
            if kept == len(self._came):
                break
            likelier = (
                _likelihood(late, late_s)
                + _likelihood(number - late, seconds - late_s)
                - _likelihood(number, seconds)
            )
            if likelier > best:
                best, keep = likelier, kept
        if 2 * best / max(1.0, self._bunched) >= CHANGED:
            while len(self._came) > keep:
                self._came.popleft()

    def _fit(self) -> None:
        """Fit a line, of which accident takes its part of the slope."""
        seconds, number = self._seconds(), sum(each for _, each in self._came)
        mean, at_s = number / seconds, 0.0
        slope = square = 0.0
        for each_s, each in self._came:
            middle_s = at_s + each_s / 2 - seconds / 2
            slope += middle_s * (each - mean * each_s)
            square += middle_s * middle_s * each_s
            at_s += each_s
        accident = max(1.0, self._bunched) * mean * square
        self.trend = 0.0
        if seconds >= TREND_FROM_S and slope * slope > accident:
            self.trend = slope / square * (1 - accident / slope**2)
        self.level = max(0.0, mean + self.trend * seconds / 2)

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


def _likelihood(number: float, seconds: float) -> float:
    """Return the logarithm of how likely so many are at their own mean rate, but for what is the
    same at all rates."""
    return number * math.log(number / seconds) if number > 1e-9 else 0.0
