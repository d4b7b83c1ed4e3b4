"""Makes what a planner sees of one model: from sums of what was asked at the doors, and from what
its engines say.

Does no I/O; the clock is given. What prompts and answers are like is averaged over a long time, how
many come is forecast: a mix that changes in a minute is rare, and few requests say little of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from engine.protocol import ReplicaStatus, StepCosts
from gateway.fleet.planner.decision import PoolObservation
from gateway.fleet.planner.forecast import Forecast
from gateway.fleet.planner.sizing import PoolLoad, PromptTransfer
from gateway.fleet.predicted_time import UNTOLD, StepPrice
from gateway.fleet.sent_work import AskedColumn

MIX_S = 900.0
"""The time constant of what requests are like."""
LATELY_S = 60.0
FIRST_START_S = 60.0
"""How long a replica is taken to start before one was seen to."""
USUAL_RATE = 0.5 / 60
"""Requests a second on other days for which a model that is at zero is started ahead."""
URGENT = ("interactive", "agentic")


class Learnt(msgspec.Struct, kw_only=True):
    """Keeps what one process of the planner learnt of a model for the next."""

    start_s: float | None = None
    """How long the last replica took to start; None: none was seen."""
    profile: list[float] = []
    """See `Forecast`."""
    engine_bytes: int | None = None
    """The memory of one of its engines, as measured; None: none was."""
    reading: tuple[float, float] | None = None
    """Seconds until the first tokens that an engine reads of another are there, and for each token;
    None: none was read."""


class _Mix(msgspec.Struct):
    """Sums that fade: what requests of the last time were like."""

    requests: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    prompt_tokens: float = 0.0
    all_requests: float = 0.0
    """Batches included, as in the tokens."""
    tokens: float = 0.0

    def fade(self, interval_s: float) -> None:
        part = math.exp(-interval_s / MIX_S)
        for name in self.__struct_fields__:
            setattr(self, name, part * getattr(self, name))


class ModelWatch:
    """One model. Times are Unix seconds."""

    def __init__(self, now_s: float, learnt: Learnt | None = None) -> None:
        learnt = learnt or Learnt()
        self.start_s, self.engine_bytes = learnt.start_s, learnt.engine_bytes
        self._reading = learnt.reading
        self._assumed_reading: tuple[float, float] | None = None
        """None: no engine can read another one's blocks."""
        self.forecast = Forecast(learnt.profile)
        self._at_s = self._busy_at_s = now_s
        self._grown_at_s = -math.inf
        self._mix = _Mix()
        self._asked: Mapping[AskedColumn, float] | None = None
        self._tokens: dict[str, int] = {}
        """By engine process, as of its last word."""
        self._lately: deque[tuple[float, float, float]] = deque()
        """At which second how many were asked, and how many were late."""
        self._costs, self._token_s = StepCosts(), 0.0

    @property
    def learnt(self) -> Learnt:
        return Learnt(
            start_s=self.start_s,
            profile=self.forecast.profile,
            engine_bytes=self.engine_bytes,
            reading=self._reading,
        )

    def grew(self, now_s: float) -> None:
        """Note that a replica was wanted that was not there."""
        self._grown_at_s = now_s

    def observe(
        self,
        now_s: float,
        running: int,
        asked: Mapping[AskedColumn, float],
        statuses: Sequence[ReplicaStatus],
    ) -> PoolObservation:
        """`asked`: all that was ever asked. `statuses`: the last word of each engine there is."""
        interval_s = max(1e-3, now_s - self._at_s)
        self._at_s = now_s
        self._learn_costs(statuses)
        self._learn_reading(statuses)
        rate = self._count(now_s, interval_s, asked, statuses)
        self.forecast.observe(now_s, rate, interval_s)
        if any(each.num_running or each.num_waiting for each in statuses):
            self._busy_at_s = now_s
        start_s = FIRST_START_S if self.start_s is None else self.start_s
        expected = self.forecast.at(now_s, start_s + interval_s)
        usual = self.forecast.usual(now_s + start_s)
        waiting_s, batch_s = self._waiting(statuses)
        return PoolObservation(
            now_s=now_s,
            running=running,
            load=self._load(expected),
            rate=self.forecast.level,
            expected_rate=expected,
            start_s=start_s,
            waiting_s=waiting_s,
            batch_waiting_s=batch_s,
            kv_used=sum(each.kv_cache_usage for each in statuses),
            asked=sum(number for _, number, _ in self._lately),
            late=sum(number for _, _, number in self._lately),
            since_growth_s=now_s - self._grown_at_s,
            idle_for_s=now_s - self._busy_at_s,
            expects_some=usual is not None and usual >= USUAL_RATE,
        )

    def _count(
        self,
        now_s: float,
        interval_s: float,
        asked: Mapping[AskedColumn, float],
        statuses: Sequence[ReplicaStatus],
    ) -> float:
        """Count what came since the last look; return how many a second somebody waits for."""
        tokens = 0
        for each in statuses:  # a process that is new has said all that it said since the last look
            tokens += each.generated_tokens - self._tokens.get(each.engine_id, 0)
        self._tokens = {each.engine_id: each.generated_tokens for each in statuses}
        before, self._asked = self._asked, asked
        if before is None:  # whatever came before this process is not of now
            return 0.0
        fresh = {column: asked[column] - before[column] for column in asked}
        mix = self._mix
        mix.fade(interval_s)
        mix.requests += fresh["requests"]
        mix.seconds += fresh["seconds"]
        mix.squares += fresh["squares"]
        mix.prompt_tokens += fresh["tokens"]
        mix.all_requests += fresh["requests"] + fresh["batch_requests"]
        mix.tokens += max(0, tokens)
        self._lately.append((now_s, fresh["requests"], fresh["late"]))
        while self._lately[0][0] <= now_s - LATELY_S:
            self._lately.popleft()
        if fresh["requests"] or fresh["batch_requests"]:
            self._busy_at_s = now_s
        return fresh["requests"] / interval_s

    def _learn_costs(self, statuses: Sequence[ReplicaStatus]) -> None:
        learnt = [each for each in statuses if each.costs != UNTOLD]
        if not learnt:
            return
        self._costs = costs = learnt[0].costs
        decodes = sum(lane.num_running for each in learnt for lane in each.lanes.values())
        if decodes:
            context = sum(each.context_tokens for each in learnt) / decodes
            self._token_s = costs.decode_s + costs.context_token_s * context

    def _learn_reading(self, statuses: Sequence[ReplicaStatus]) -> None:
        """Learn of the engine that read most of others; all say what they assume until then."""
        peers = [(each.fetched_tokens, each.peer) for each in statuses if each.peer is not None]
        self._assumed_reading = None
        if peers:
            read_tokens, peer = max(peers, key=lambda each: each[0])
            self._assumed_reading = peer.read_s, peer.read_token_s
            if read_tokens:
                self._reading = self._assumed_reading

    def _transfer(self) -> PromptTransfer | None:
        """Return what reading a prompt takes; None: no engine can, or nobody knows the prompts."""
        if self._assumed_reading is None or not self._mix.requests:
            return None
        read_s, token_s = self._reading or self._assumed_reading
        tokens = self._mix.prompt_tokens / self._mix.requests
        return PromptTransfer(
            seconds=read_s + token_s * tokens, tokens=tokens, is_learnt=self._reading is not None
        )

    def _load(self, rate: float) -> PoolLoad:
        mix = self._mix
        mean_s = mix.seconds / mix.requests if mix.requests else 0.0
        tokens = mix.tokens / mix.all_requests if mix.all_requests else 0.0
        return PoolLoad(
            prompts_s=rate * mean_s,
            decodes_s=rate * tokens * self._token_s,
            mean_prompt_s=mean_s,
            residual_s=mix.squares / (2 * mix.seconds) if mix.seconds else 0.0,
            step_s=self._costs.step_s,
            rate=rate,
            answer_tokens=tokens,
            transfer=self._transfer(),
        )

    def _waiting(self, statuses: Sequence[ReplicaStatus]) -> tuple[float, float]:
        """Return the seconds of one replica's work that wait, and those of batches."""
        urgent = batches = 0.0
        for status in statuses:
            costs = self._costs if status.costs == UNTOLD else status.costs
            price = StepPrice.of(status, costs)
            for lane, each in status.lanes.items():
                seconds = price.seconds(each.waiting_tokens, each.waiting_pairs)
                if lane in URGENT:
                    urgent += seconds
                else:
                    batches += seconds
        return urgent, batches
