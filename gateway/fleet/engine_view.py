"""Views an engine: what it said last, and what all workers of this home have sent it since.

Knows neither the socket nor the request; the clock is given. What waits at the replica is known in
seconds of its work: a status sets it, what is sent adds to it at once, and time takes it away, the
highest lane's first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from engine.fairness import LANE_RANKS
from engine.protocol import Lane, ReplicaStatus
from gateway.fleet.predicted_time import ModelCosts, Prompt, StepPrice, ahead
from gateway.fleet.sent_work import SentWork

RECENT_S = 60.0
"""Work counts as recent for so long, on average."""
IN_PHASE_S = 1.0
"""So long after a status, which is said before a step, it is known when the step in flight ends."""


class EngineView:
    """One replica as one worker sees it. `costs`: of all engines of its model; `clock`: monotonic
    seconds."""

    def __init__(
        self,
        sent: SentWork,
        costs: ModelCosts | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.status: ReplicaStatus | None = None
        self.on_heard: Callable[[EngineView], None] | None = None
        """Hears that the engine has said something, once that is taken in."""
        self.price = StepPrice()
        self.clock = clock
        self.heard_at_s = self._now_s = clock()
        """The time of the last status, or of this view where there is none."""
        self._sent, self._costs = sent, costs or ModelCosts()
        self._total_s, self._totals_s = sent.total(), sent.totals()
        self._waiting_s = [0.0] * len(LANE_RANKS)
        """By the lanes' ranks, as of the last look."""
        self._recent_s = 0.0

    @property
    def recent_s(self) -> float:
        """Return the seconds of work that all workers have sent it lately, as of the last look."""
        return self._recent_s

    def heard(self, status: ReplicaStatus) -> None:
        """Take in what the replica says of itself."""
        self._look(self.clock())
        self.status, self.heard_at_s = status, self._now_s
        price = self.price = StepPrice.of(status, self._costs.known(status.costs))
        for lane, each in status.lanes.items():
            waiting_s = price.seconds(each.waiting_tokens, each.waiting_pairs)
            self._waiting_s[LANE_RANKS[lane]] = waiting_s
        if self.on_heard is not None:
            self.on_heard(self)

    def seconds_to_first_token(self, prompt: Prompt, lane: Lane) -> float:
        """Predict, before any correction."""
        own_s = self.price.own_seconds(prompt.missing, prompt.cached)
        return self.predict(own_s, LANE_RANKS[lane], self.clock())

    def predict(self, own_s: float, rank: int, now_s: float) -> float:
        """Predict for a prompt that takes so long by itself, by the rank of its lane."""
        self._look(now_s)
        waiting_s = self._waiting_s
        if any(waiting_s):
            return ahead(waiting_s, rank, own_s) + own_s
        return self._step_left_s(now_s) + own_s

    def is_free(self, rank: int) -> bool:
        """Tell whether no prompt of a lane or of one above it waits there, as of the last look."""
        return not any(self._waiting_s[: rank + 1])

    def left_s(self, rank: int, place: float) -> float:
        """Predict the seconds to the first token of a request that waits there, as if what came
        after it were served after it. `place`: as of its sending, see `send`."""
        self._look(self.clock())
        waiting_s, behind_s = self._waiting_s.copy(), self._totals_s[rank] - place
        waiting_s[rank] = max(0.0, waiting_s[rank] - max(0.0, behind_s))
        return ahead(waiting_s, rank, 0.0)

    def send(self, prompt: Prompt, lane: Lane) -> float:
        """Note that a prompt is on its way there, for all workers. Return its place in the queue of
        its lane: all that was ever sent there until then, in seconds."""
        now_s = self.clock()
        self._look(now_s)
        left_s = 0.0 if any(self._waiting_s) else self._step_left_s(now_s)
        seconds = left_s + self.price.own_seconds(prompt.missing, prompt.cached)
        self._sent.add(lane, seconds)
        return self._totals_s[LANE_RANKS[lane]] + seconds

    def close(self) -> None:
        """Count for nobody else any more."""
        self._sent.close()

    def _step_left_s(self, now_s: float) -> float:
        """Return what is left of the step in flight, in which no prompt is: one that comes waits
        for its end."""
        step_s = self.price.beside_s
        if not self.price.decodes:
            return 0.0
        since_s = now_s - self.heard_at_s
        return step_s - since_s % step_s if since_s < IN_PHASE_S and step_s else step_s / 2

    def _look(self, now_s: float) -> None:
        """Add what was sent since the last look, and take away what was computed meanwhile."""
        since_s, self._now_s = now_s - self._now_s, now_s
        waiting_s = self._waiting_s
        left_s = since_s
        for rank, before_s in enumerate(waiting_s):
            if before_s:
                done_s = before_s if before_s < left_s else left_s
                waiting_s[rank] = before_s - done_s
                left_s -= done_s
        if self._recent_s:
            self._recent_s *= math.exp(-since_s / RECENT_S)
        if (total_s := self._sent.total()) != self._total_s:
            self._take_in(total_s)

    def _take_in(self, total_s: float) -> None:
        totals_s = self._sent.totals()
        for rank, (all_s, before_s) in enumerate(zip(totals_s, self._totals_s, strict=True)):
            self._waiting_s[rank] = max(0.0, self._waiting_s[rank] + all_s - before_s)
            self._recent_s = max(0.0, self._recent_s + all_s - before_s)
        self._total_s, self._totals_s = total_s, totals_s
