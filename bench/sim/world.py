"""A scheduler, a clock that jumps from step to step, and those who ask.

Knows no scenario and judges nothing.

All tokens are the same token; what may be found in the prefix cache is said by the salt, one for
each session, whose turns repeat what was said before and add to it. An answer has the length that
was asked for. Time passes in steps alone; whoever comes during one is there for the next, as in the
engine. Where a setup has rules, a gateway's admission stands before it, which knows of the engine
what that says of itself now and then.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

import msgspec

from bench.sim.admission import Rules, SimulatedAdmission
from bench.sim.cost import Cost
from bench.sim.orderings import Ordering
from engine.config import BLOCK_SIZE, EngineConfig
from engine.errors import EngineOverloaded
from engine.fairness import LANE_WEIGHTS
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_cache import PrefixCache
from engine.protocol import EngineOutput, EngineRequest, Lane, ReplicaStatus, SamplingParams
from engine.scheduling.lanes import limits_of
from engine.scheduling.pace import Pace
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_costs import StepWork
from engine.sequence import SampledTokens

_SERVED = EngineConfig(model=Path("."))
"""For what an engine has that is told nothing."""
IDLE = ReplicaStatus(
    model="model",
    protocol_version=0,
    max_model_len=1_000_000,
    vocab_size=1,
    eos_token_ids=[],
    block_size=BLOCK_SIZE,
    num_blocks=0,
    num_free_blocks=0,
    num_running=0,
    num_waiting=0,
    kv_cache_usage=0.0,
    num_leased_blocks=0,
    prefix_cache_query_tokens=0,
    prefix_cache_hit_tokens=0,
    num_preemptions=0,
    num_steps=0,
    generated_tokens=0,
    num_draft_tokens=0,
    num_accepted_tokens=0,
    engine_id="",
    step_timeout_s=60.0,
    embedding_size=1,
    generates=True,
)
"""The status of an engine that does nothing, for what a simulated one says."""
_TOKEN = 1
_SAID: SampledTokens = [(_TOKEN, None)]


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: int
    """All of it: what was said before, too."""
    answer: int
    after_s: float = 0.0
    """Since the turn before ended."""


@dataclass(frozen=True, slots=True)
class Session:
    start_s: float
    lane: Lane
    tenant: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of the engine. max_waiting is large, for what comes too often should be seen to
    wait."""

    num_blocks: int = 8192
    max_model_len: int = 32_768
    max_num_batched_tokens: int = _SERVED.max_num_batched_tokens
    max_num_seqs: int = _SERVED.max_num_seqs
    max_waiting: int = 10_000_000
    itl_target_s: float | None = _SERVED.itl_target_s
    pace: Callable[[], Pace] | None = None
    """Makes what decides how much of prompts a step computes; None: the engine's, for
    `itl_target_s`."""
    rules: Rules | None = None
    """The admission rules; None: every request is admitted and none has a deadline."""


@dataclass(slots=True)
class Fate:
    """The outcome of a turn."""

    session: Session
    turn: int
    asked: Turn
    arrival_s: float
    cached: int = 0
    num_computed: int = 0
    """The computed tokens of its prompt."""
    first_s: float | None = None
    last_s: float = 0.0
    said: int = 0
    is_done: bool = False
    was_refused: bool = False
    """By the gateway, or by the engine."""


@dataclass(slots=True)
class Outcome:
    horizon_s: float
    fates: list[Fate] = field(default_factory=list)
    num_steps: int = 0
    num_preemptions: int = 0
    busy_s: float = 0.0
    gaps_s: dict[Lane, array[float]] = field(
        default_factory=lambda: {lane: array("d") for lane in LANE_WEIGHTS}
    )
    """Seconds between two tokens of a turn, by lane."""


_Arrival = tuple[float, int, int, Session]
"""When, the session's number, the turn."""


class _Coming:
    """The arrivals to come, the soonest first: first turns, known from the beginning, are sorted
    once; a heap has the others."""

    def __init__(self, sessions: Iterable[Session]) -> None:
        first = [(each.start_s, number, 0, each) for number, each in enumerate(sessions)]
        self._first: list[_Arrival] = sorted(first, reverse=True)
        self._later: list[_Arrival] = []
        self.next_s = math.inf
        self._look()

    def push(self, arrival: _Arrival) -> None:
        heappush(self._later, arrival)
        self._look()

    def pop(self) -> _Arrival:
        """The one at `next_s`, which is finite."""
        first, later = self._first, self._later
        is_later = later and not (first and first[-1] < later[0])
        found = heappop(later) if is_later else first.pop()
        self._look()
        return found

    def _look(self) -> None:
        self.next_s = self._first[-1][0] if self._first else math.inf
        if self._later and self._later[0][0] < self.next_s:
            self.next_s = self._later[0][0]


class World:
    def __init__(self, cost: Cost, ordering: Ordering, setup: Setup) -> None:
        self.now_s = 0.0
        self.open: dict[str, Fate] = {}
        self._gate = (
            None if setup.rules is None else SimulatedAdmission(setup.rules, lambda: self.now_s)
        )
        self._status_at_s = -math.inf
        self._cost, self._ordering = cost, ordering
        self._tokens = [_TOKEN] * setup.max_model_len
        self._sampling: dict[int, SamplingParams] = {}
        self._scheduler = Scheduler(
            cache=PrefixCache(BlockPool(setup.num_blocks), BLOCK_SIZE),
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_num_seqs=setup.max_num_seqs,
            max_waiting=dict.fromkeys(LANE_WEIGHTS, setup.max_waiting),
            max_model_len=setup.max_model_len,
            vocab_size=_TOKEN + 1,
            eos_token_ids=(),
            clock=lambda: self.now_s,
            pace=Pace(setup.itl_target_s) if setup.pace is None else setup.pace(),
            lane_limits=limits_of(_SERVED),
            share=ordering.share(),
        )

    def run(self, sessions: Iterable[Session], horizon_s: float) -> Outcome:
        """Until then, or until all is answered."""
        outcome, scheduler = Outcome(horizon_s), self._scheduler
        coming = _Coming(sessions)
        while self.now_s < horizon_s:
            while coming.next_s <= self.now_s:
                at_s, number, turn, session = coming.pop()
                fate = Fate(session, turn, session.turns[turn], at_s)
                outcome.fates.append(fate)
                self._add(fate, f"{number}.{turn}", str(number))
            if self._gate is not None:
                for name in scheduler.expire():
                    self.open.pop(name).was_refused = True
                    self._gate.void(name)
            if not scheduler.has_work():
                if coming.next_s == math.inf:
                    break
                self.now_s = coming.next_s
                continue
            for output in self._step(outcome):
                fate = self._hear(output, outcome.gaps_s)
                if fate.is_done and fate.turn + 1 < len(fate.session.turns):
                    number, turn = int(output.request_id.partition(".")[0]), fate.turn + 1
                    at_s = self.now_s + fate.session.turns[turn].after_s
                    coming.push((at_s, number, turn, fate.session))
        for seq in scheduler.running:
            fate = self.open[seq.request_id]
            fate.cached = seq.num_cached_tokens or 0
            fate.num_computed = seq.num_charged_tokens - fate.cached
        outcome.num_preemptions = scheduler.num_preemptions
        return outcome

    def _add(self, fate: Fate, name: str, salt: str) -> None:
        asked = fate.asked
        lane, tenant = self._ordering.turn(fate.session.lane, fate.session.tenant)
        sampling = self._sampling.get(asked.answer)
        if sampling is None:
            sampling = SamplingParams(max_tokens=asked.answer, ignore_eos=True, seed=0)
            self._sampling[asked.answer] = sampling
        prompt, deadline_s = self._tokens[: asked.prompt], None
        if self._gate is not None:
            self._say_status(self._gate)
            deadline_s = self._gate.deadline_s(lane)
            refused = self._gate.refuses(
                name, fate.session.tenant, lane, prompt, asked.answer, salt=salt
            )
            if refused is not None:
                fate.was_refused = True
                return
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=sampling,
            cache_salt=salt,
            lane=lane,
            tenant=tenant,
            deadline_s=deadline_s,
        )
        try:
            self._scheduler.add(request)
        except EngineOverloaded:
            fate.was_refused = True
            if self._gate is not None:
                self._gate.void(name)
        else:
            self.open[name] = fate

    def _say_status(self, gate: SimulatedAdmission) -> None:
        """Tell a gateway as often as the engine does."""
        if self.now_s - self._status_at_s >= _SERVED.status_interval_s:
            scheduler, self._status_at_s = self._scheduler, self.now_s
            gate.heard(
                msgspec.structs.replace(
                    IDLE,
                    costs=self._cost,
                    max_step_tokens=scheduler.max_num_batched_tokens,
                    context_tokens=scheduler.num_context_tokens,
                    lanes=scheduler.lanes(),
                )
            )

    def _step(self, outcome: Outcome) -> list[EngineOutput]:
        scheduler = self._scheduler
        output = scheduler.schedule()
        assert output.scheduled, "there is work, nothing is paused, and no step is in flight"
        parts = StepWork.of(output.scheduled)
        step_s = parts.seconds(self._cost)
        self.now_s += step_s
        outcome.num_steps += 1
        outcome.busy_s += step_s
        num_long_tokens = output.num_long_tokens if parts.prompt_tokens else 0
        scheduler.pace.observe(parts.decodes, parts.prompt_tokens, step_s, num_long_tokens)
        return scheduler.update(output, {e.key: _SAID for e in output.scheduled if e.samples})

    def _hear(self, output: EngineOutput, gaps_s: dict[Lane, array[float]]) -> Fate:
        name, now_s = output.request_id, self.now_s
        fate = self.open[name]
        if fate.first_s is None:
            fate.first_s = now_s
            fate.cached = output.usage.cached_tokens
            fate.num_computed = fate.asked.prompt - fate.cached
            if self._gate is not None:
                self._gate.began(name, now_s - fate.arrival_s)
        else:
            gaps_s[fate.session.lane].append(now_s - fate.last_s)
        fate.last_s = now_s
        fate.said += 1
        if output.finished:
            fate.is_done = True
            del self.open[name]
            if self._gate is not None:
                self._gate.settle(name, fate.asked.prompt, fate.said)
        return fate
