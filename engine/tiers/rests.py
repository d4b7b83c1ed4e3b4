"""Tells which prompts leave a source alone that brought nothing in time.

A prompt waits the longer for a read the longer it takes to compute (`policy.patience_s`). So a
source that is late for one is late for all that wait shorter, which says nothing about those that
wait longer. Waits are told apart by powers of two, and each of these classes has a rest of its own:

    late     who would wait about as long, or shorter, leaves the source alone for a while: not at
             all after the first time, which may have been a stall; then for FIRST_REST_S; twice as
             long each time that a prompt of this class waited in vain again, up to MAX_REST_S
    in time  ends the rests of this class and of all that wait longer

A source that is always late costs each class one wait in MAX_REST_S, and none that has recovered is
left alone for longer than that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

FIRST_REST_S, MAX_REST_S = 1.0, 8.0
MIN_CLASS, MAX_CLASS = -20, 20
"""From a microsecond to 12 days: it bounds what is remembered."""


class _Rest(NamedTuple):
    began_s: float
    length_s: float

    @property
    def end_s(self) -> float:
        return self.began_s + self.length_s


class SourceRests:
    """Remembers, by source and class of wait, what was late. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._rests: defaultdict[str, dict[int, _Rest]] = defaultdict(dict)

    def is_left_alone(self, source: str, wait_s: float, now_s: float) -> bool:
        """Whether a prompt that would wait for `wait_s` is not to ask a source now."""
        least = _class_of(wait_s)
        rests = self._rests.get(source, {})
        return any(each >= least and now_s < rest.end_s for each, rest in rests.items())

    def was_late(self, source: str, wait_s: float, started_s: float, now_s: float) -> None:
        """Note that a prompt waited in vain, from `started_s` on. Of those that waited at the same
        time, one counts."""
        rests, number = self._rests[source], _class_of(wait_s)
        before = rests.get(number)
        if before is None:
            rests[number] = _Rest(now_s, 0.0)
        elif started_s >= before.began_s:
            rests[number] = _Rest(now_s, min(MAX_REST_S, max(FIRST_REST_S, 2 * before.length_s)))

    def was_in_time(self, source: str, wait_s: float) -> None:
        """Note that a prompt that would have waited for `wait_s` was brought all it asked for."""
        rests, least = self._rests.get(source, {}), _class_of(wait_s)
        for number in [each for each in rests if each >= least]:
            del rests[number]


def _class_of(wait_s: float) -> int:
    """Return the power of two that is next above."""
    number = math.frexp(wait_s)[1] if wait_s > 0 else MIN_CLASS
    return max(MIN_CLASS, min(MAX_CLASS, number))
