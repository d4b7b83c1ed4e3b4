"""Views an engine: what it said last, and what all workers of this home have sent it since.

Knows neither the socket nor the request; the clock is given. What waits at the replica is known in
seconds of its work: a status sets it, what is sent adds to it at once, and time takes it away.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from engine.fairness import LANE_WEIGHTS
from engine.protocol import Lane, ReplicaStatus
from gateway.fleet.predicted_time import Prompt, StepPrice, ahead
from gateway.fleet.sent_work import SentWork

RECENT_S = 60.0
"""Work counts as recent for so long, on average."""


class EngineView:
    """One replica as one worker sees it. `clock`: monotonic seconds."""

    def __init__(self, sent: SentWork, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.status: ReplicaStatus | None = None
        self.price = StepPrice()
        self._sent, self._clock = sent, clock
        self._heard_at_s = self._now_s = clock()
        self._totals_s = sent.totals_s()
        self._waiting_s: dict[Lane, float] = dict.fromkeys(LANE_WEIGHTS, 0.0)
        self._recent_s = 0.0

    @property
    def age_s(self) -> float:
        """Return how old the last status is, or this view where there is none."""
        return self._clock() - self._heard_at_s

    @property
    def recent_s(self) -> float:
        """Return the seconds of work that all workers have sent it lately, as of the last look."""
        return self._recent_s

    def heard(self, status: ReplicaStatus) -> None:
        """Take in what the replica says of itself."""
        self._catch_up()
        self.status, self._heard_at_s = status, self._now_s
        price = self.price = StepPrice.of(status)
        for lane, each in status.lanes.items():
            self._waiting_s[lane] = price.seconds(each.waiting_tokens, each.waiting_pairs)

    def seconds_to_first_token(self, prompt: Prompt, lane: Lane) -> float:
        """Predict, before any correction."""
        self._catch_up()
        own_s = self.price.own_seconds(prompt)
        return ahead(self._waiting_s, lane, own_s) + own_s

    @property
    def is_free(self) -> bool:
        """Tell whether no prompt waits there, as of the last look."""
        return not any(self._waiting_s.values())

    def send(self, prompt: Prompt, lane: Lane) -> None:
        """Note that a prompt is on its way there, for all workers."""
        self._sent.add(lane, self.price.own_seconds(prompt))

    def close(self) -> None:
        """Count for nobody else any more."""
        self._sent.close()

    def _catch_up(self) -> None:
        """Add what was sent since the last look, and take away what was computed meanwhile."""
        now_s, totals_s = self._clock(), self._sent.totals_s()
        left_s = since_s = now_s - self._now_s
        waiting_s, added_s = self._waiting_s, 0.0
        for lane, before_s in waiting_s.items():
            done_s = min(before_s, left_s)
            left_s -= done_s
            sent_s = totals_s[lane] - self._totals_s[lane]
            waiting_s[lane] = max(0.0, before_s - done_s + sent_s)
            added_s += sent_s
        self._recent_s = max(0.0, self._recent_s * math.exp(-since_s / RECENT_S) + added_s)
        self._now_s, self._totals_s = now_s, totals_s
