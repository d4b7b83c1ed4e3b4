"""Simulates replicas that a router chooses among, on virtual time.

A replica runs steps whose seconds the cost model of `bench.sim` says: each decodes a token of all
that decode, and takes of the prompts, in their order, what is left of the step's tokens. A prompt
starts when its blocks and those of its answer have room; blocks that nobody uses are the prefix
cache, evicted by last use. It says what it has to do at the begin of a step, at most every
`status_interval_s`, as the engine does (`engine.transport.step_loop`), and all workers hear it.

Between two arrivals a replica that only decodes is moved by as many steps as nothing changes in.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol, cast

import msgspec

from bench.fleet.trace import BLOCK_TOKENS, TracedRequest
from bench.sim.cost import Cost
from bench.sim.world import IDLE
from engine.protocol import LaneStatus, PeerStatus, ReplicaStatus

NUM_WORKERS = 4
READ_S = 2e-3
"""Until the first tokens of another replica are read."""
KV_BLOCK_TOKENS = 16
"""Reading ends with a block of the engine's, which are smaller than those of a trace."""
SLICE_S = 0.01
"""How often it is looked whose prompt is computed, where others go on."""


class FleetSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of all replicas."""

    cost: Cost
    num_replicas: int = 8
    kv_tokens: int = 840_000
    max_step_tokens: int = 2_048
    status_interval_s: float = 0.1
    frozen: bool = False
    """No status is told after the first one."""
    num_prefill: int = 0
    """So many of the replicas, the first ones, compute prompts for the others."""
    read_token_s: float = 0.0
    """Seconds to read the KV of a token from another replica, of which one prompt is read after the
    other."""


@dataclass(slots=True, eq=False)
class RequestFate:
    """The outcome of a request."""

    asked: TracedRequest
    worker: int = 0
    replica: int = -1
    """-1: it was refused."""
    cached: int = 0
    """Tokens of its prompt that were found in the cache when it started."""
    num_found: int = 0
    """Those that were in the cache when it came to the replica."""
    first_s: float = math.inf
    last_s: float = math.inf
    predicted_s: float | None = None
    place: float = 0.0
    """Its place in the queue, as `EngineView.send` returned it."""
    computed: int = 0
    moves: bool = False
    """Its prompt is computed by one replica, and another one goes on."""
    came_s: float = 0.0
    """When it came to the replica that has it."""
    pinned: list[int] = field(default_factory=list)
    own_blocks: int = 0
    """The blocks of its answer and of the end of its prompt."""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.asked.arrival_s

    @property
    def tpot_s(self) -> float:
        more = self.asked.output_length - 1
        return (self.last_s - self.first_s) / more if more else 0.0

    @property
    def missing(self) -> int:
        """Return the tokens of its prompt that are not computed yet."""
        return self.asked.input_length - self.computed

    @property
    def missing_pairs(self) -> float:
        return self.missing * (self.computed + self.missing / 2)

    @property
    def was_refused(self) -> bool:
        return self.replica < 0


class Router(Protocol):
    """Chooses a replica for each request."""

    def choose(self, fate: RequestFate, now_s: float) -> int | None:
        """Return the replica for a request that has just come. None: it is refused."""

    def heard(self, replica: int, status: ReplicaStatus, now_s: float) -> None:
        """Hear what a replica said."""

    def began(self, fate: RequestFate) -> None:
        """Hear that a request has its first token."""


class RoleRouter(Router, Protocol):
    """Also chooses who goes on behind a prompt."""

    def choose_next(self, fate: RequestFate, now_s: float) -> int:
        """Return the replica that goes on with a request that `moves`."""


class SimulatedCache:
    """The blocks of one replica: those that requests use, and those that may be evicted."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_own = 0
        """Blocks of answers, and of ends of prompts."""
        self._uses: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def cached_blocks(self, hash_ids: Sequence[int]) -> int:
        found = 0
        for block in hash_ids:
            if block not in self._uses and block not in self._idle:
                break
            found += 1
        return found

    @property
    def num_used(self) -> int:
        return len(self._uses) + self.num_own

    def has_room(self, fate: RequestFate, found: int) -> bool:
        more = self.blocks_of(fate.asked) - found
        idle_found = sum(block in self._idle for block in fate.asked.hash_ids[:found])
        return self.num_used + idle_found + more <= self.num_blocks

    def blocks_of(self, asked: TracedRequest) -> int:
        return -(-(asked.input_length + asked.output_length) // BLOCK_TOKENS)

    def start(self, fate: RequestFate, found: int) -> None:
        full = fate.asked.input_length // BLOCK_TOKENS
        for block in fate.asked.hash_ids[:found]:
            self._use(block)
        fate.pinned = list(fate.asked.hash_ids[:found])
        fate.own_blocks = self.blocks_of(fate.asked) - found
        self.num_own += fate.own_blocks
        assert full >= found
        while self.num_used + len(self._idle) > self.num_blocks:
            self._idle.popitem(last=False)

    def computed(self, fate: RequestFate) -> None:
        """Let others find the blocks of its prompt that are full by now."""
        full = min(fate.computed, fate.asked.input_length) // BLOCK_TOKENS
        for block in fate.asked.hash_ids[len(fate.pinned) : full]:
            self._use(block)
            fate.pinned.append(block)
            fate.own_blocks -= 1
            self.num_own -= 1

    def end(self, fate: RequestFate) -> None:
        self.num_own -= fate.own_blocks
        for block in reversed(fate.pinned):
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]
                self._idle[block] = None

    def _use(self, block: int) -> None:
        self._idle.pop(block, None)
        self._uses[block] = self._uses.get(block, 0) + 1


class SimulatedReplica:
    """One engine: a queue, the prompts under way and those that decode."""

    def __init__(self, number: int, setup: FleetSetup, router: Router) -> None:
        self.number, self.now_s = number, 0.0
        self.times_slower = 1.0
        """Its steps take so many times as long as it says."""
        self.work_s = 0.0
        """Seconds of its steps beyond the fixed part of each."""
        self.num_generated = 0
        self.cache = SimulatedCache(setup.kv_tokens // BLOCK_TOKENS)
        self._setup, self._cost, self._router = setup, setup.cost, router
        self._waiting: deque[RequestFate] = deque()
        self._prompts: deque[RequestFate] = deque()
        self._ends: list[tuple[int, int, RequestFate]] = []
        """The step after which a request has said all, by the soonest."""
        self._num_steps = self._num_started = 0
        self._context = 0
        """Tokens before the next one of all that decode."""
        self._waiting_tokens = 0
        self._waiting_pairs = 0.0
        self._said_at_s = -math.inf
        self._peer: PeerStatus | None = None
        if setup.num_prefill:
            self._peer = PeerStatus(
                address="", layout=b"", read_s=READ_S, read_token_s=setup.read_token_s
            )
        self.moved: deque[RequestFate] = deque()
        """Requests with a first token that another replica is to go on with."""
        self.is_read_until_s = 0.0
        """The end of all reads of it by others that have begun."""
        self.begun: deque[RequestFate] = deque()
        """Requests with a first token of which nobody has heard yet."""

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._prompts or self._ends)

    def add(self, fate: RequestFate) -> None:
        """Queue a request that came at `now_s` of its own clock, or during the step before that."""
        if not self.is_busy:
            self.now_s = max(self.now_s, fate.came_s)
        fate.num_found = fate.computed or self._find(fate) * BLOCK_TOKENS
        self._waiting.append(fate)
        self._count(fate, 1)

    def run(self, until_s: float) -> None:
        """Run all steps that begin before then."""
        while self.now_s < until_s and self.is_busy:
            self._say_status()
            self._start_waiting()
            if self._prompts:
                self._step()
            else:
                self._decode_on(until_s)
            if not self.is_busy:
                self._say_status(at_once=True)

    def give_back(self, fate: RequestFate) -> bool:
        """Take a request out of the queue, and tell whether it was there."""
        if fate not in self._waiting:
            return False
        self._waiting.remove(fate)
        self._count(fate, -1)
        return True

    def _count(self, fate: RequestFate, sign: int) -> None:
        """Count a request that begins or ceases to wait."""
        missing = fate.asked.input_length - fate.num_found
        self._waiting_tokens += sign * missing
        self._waiting_pairs += sign * missing * (fate.num_found + missing / 2)

    def _start_waiting(self) -> None:
        while self._waiting:
            fate = self._waiting[0]
            found = self._find(fate)
            if not self.cache.has_room(fate, found):
                return
            budget = self._setup.max_step_tokens - len(self._ends)
            if sum(each.asked.input_length - each.computed for each in self._prompts) >= budget:
                return
            self._waiting.popleft()
            self._count(fate, -1)
            self.cache.start(fate, found)
            if not fate.computed:
                fate.cached = fate.computed = found * BLOCK_TOKENS
            self._prompts.append(fate)

    def _find(self, fate: RequestFate) -> int:
        """Return how many blocks of its prompt are cached now."""
        most = (fate.asked.input_length - 1) // BLOCK_TOKENS
        return self.cache.cached_blocks(fate.asked.hash_ids[:most])

    def _step(self) -> None:
        """Run a step with prompts."""
        cost, budget = self._cost, self._setup.max_step_tokens - len(self._ends)
        prompt_s, done = 0.0, list[RequestFate]()
        for fate in self._prompts:
            if budget <= 0:
                break
            start = fate.computed
            tokens = min(budget, fate.asked.input_length - start)
            budget -= tokens
            pairs = tokens * (start + (tokens + 1) / 2)
            prompt_s += cost.prompt_token_s * tokens + cost.pair_s * pairs
            prompt_s += cost.chunk_context_token_s * start
            fate.computed += tokens
            if fate.computed == fate.asked.input_length:
                done.append(fate)
        num_decodes = len(self._ends)
        step_s = cost.step_s + cost.decode_s * num_decodes + cost.context_token_s * self._context
        self._advance(step_s + prompt_s, 1)
        for fate in self._prompts:
            self.cache.computed(fate)
        for fate in done:
            self._prompts.popleft()
            self._say_token(fate)

    def _say_token(self, fate: RequestFate) -> None:
        """Say the token behind a prompt: the first one, or the next where that was said before."""
        said = 1 if math.isinf(fate.first_s) else 2
        self.num_generated += 1
        if said == 1:
            fate.first_s = self.now_s
            self.begun.append(fate)
        if fate.asked.output_length == said:
            self._end(fate)
        elif fate.moves and said == 1:
            self.cache.end(fate)
            self.moved.append(fate)
        else:
            self._num_started += 1
            end = self._num_steps + fate.asked.output_length - said
            heappush(self._ends, (end, self._num_started, fate))
            self._context += fate.asked.input_length + said

    def _decode_on(self, until_s: float) -> None:
        """Run steps that only decode: until one ends, or a step begins after `until_s`."""
        cost, decodes = self._cost, len(self._ends)
        first_s = cost.step_s + cost.decode_s * decodes + cost.context_token_s * self._context
        more_s = cost.context_token_s * decodes
        most = self._ends[0][0] - self._num_steps
        until_s = min(until_s, max(self._said_at_s + self._setup.status_interval_s, self.now_s))
        steps = min(most, max(1, math.ceil((until_s - self.now_s) / first_s)))
        self._advance(steps * first_s + more_s * steps * (steps - 1) / 2, steps)

    def _advance(self, seconds: float, steps: int) -> None:
        """Let time pass in which each that decodes says so many tokens."""
        self.now_s += self.times_slower * seconds
        self.work_s += seconds - steps * self._cost.step_s
        self._num_steps += steps
        self._context += steps * len(self._ends)
        self.num_generated += steps * len(self._ends)
        while self._ends and self._ends[0][0] <= self._num_steps:
            _, _, fate = heappop(self._ends)
            self._context -= fate.asked.input_length + fate.asked.output_length
            self._end(fate)

    def _end(self, fate: RequestFate) -> None:
        fate.last_s = self.now_s
        self.cache.end(fate)

    def _say_status(self, *, at_once: bool = False) -> None:
        if self._setup.frozen and self._said_at_s > -math.inf:
            return
        if not at_once and self.now_s - self._said_at_s < self._setup.status_interval_s:
            return
        self._said_at_s = self.now_s
        self._router.heard(self.number, self.status(), self.now_s)

    def status(self) -> ReplicaStatus:
        left, pairs = self._waiting_tokens, self._waiting_pairs
        for fate in self._prompts:
            left += fate.missing
            pairs += fate.missing_pairs
        lane = LaneStatus(
            num_running=len(self._ends) + len(self._prompts),
            num_waiting=len(self._waiting),
            waiting_tokens=left,
            waiting_pairs=pairs,
        )
        return msgspec.structs.replace(
            IDLE,
            engine_id=f"replica-{self.number}",
            generated_tokens=self.num_generated,
            num_running=lane.num_running,
            num_waiting=lane.num_waiting,
            kv_cache_usage=self.cache.num_used / self.cache.num_blocks,
            block_size=BLOCK_TOKENS,
            num_blocks=self.cache.num_blocks,
            num_free_blocks=self.cache.num_blocks - self.cache.num_used,
            costs=self._cost,
            max_step_tokens=self._setup.max_step_tokens,
            context_tokens=self._context,
            lanes={"interactive": lane},
            peer=self._peer,
        )


class FleetWorld:
    """Replicas, and workers that send each request where the router says."""

    def __init__(self, setup: FleetSetup) -> None:
        self.setup = setup
        self.replicas: list[SimulatedReplica] = []
        self.fates: list[RequestFate] = []
        self._now_s = 0.0
        self._moving: list[RequestFate] = []
        """Those whose KV is on its way."""

    def run(self, requests: Sequence[TracedRequest], router: Router) -> list[RequestFate]:
        """Run a trace until all is answered."""
        self.replicas += [
            SimulatedReplica(number, self.setup, router)
            for number in range(self.setup.num_replicas)
        ]
        for replica in self.replicas if self._moves else ():
            router.heard(replica.number, replica.status(), 0.0)  # as on connection
        for number, asked in enumerate(requests):
            now_s, worker = asked.arrival_s, number % NUM_WORKERS
            self._run_until(now_s, router)
            fate = RequestFate(asked, worker, came_s=now_s)
            self.fates.append(fate)
            chosen = router.choose(fate, now_s)
            if chosen is not None:
                fate.replica = chosen
                self.replicas[chosen].add(fate)
        while any(math.isinf(fate.last_s) and not fate.was_refused for fate in self.fates):
            self._run_until(self._now_s + 1.0 if self._moves else math.inf, router)
        return self.fates

    @property
    def _moves(self) -> bool:
        return self.setup.num_prefill > 0

    def _run_until(self, now_s: float, router: Router) -> None:
        """Run all replicas; those that others wait for a slice of time after the other."""
        while self._now_s < now_s:
            until_s = min(now_s, self._now_s + SLICE_S) if self._moves else now_s
            for replica in self.replicas:
                replica.run(until_s)
                self._tell_begun(replica, router, until_s)
                self._begin_moves(replica)
            self._now_s = until_s
            if self._moving:
                self._move(cast("RoleRouter", router))

    def _begin_moves(self, replica: SimulatedReplica) -> None:
        """Have the prompts read that a replica computed for others, one after the other."""
        for fate in replica.moved:
            fate.computed = (fate.asked.input_length - 1) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
            begins_s = max(fate.first_s, replica.is_read_until_s)
            fate.came_s = begins_s + READ_S + self.setup.read_token_s * fate.computed
            replica.is_read_until_s = fate.came_s
            self._moving.append(fate)
        replica.moved.clear()

    def _move(self, router: RoleRouter) -> None:
        """Let others go on with those whose KV they have by now."""
        still: list[RequestFate] = []
        for fate in self._moving:
            if fate.came_s > self._now_s:
                still.append(fate)
                continue
            fate.replica = router.choose_next(fate, self._now_s)
            self.replicas[fate.replica].add(fate)
        self._moving = still

    def _tell_begun(self, replica: SimulatedReplica, router: Router, now_s: float) -> None:
        while replica.begun and replica.begun[0].first_s <= now_s:
            router.began(replica.begun.popleft())
