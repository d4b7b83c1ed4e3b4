"""The engine without a model: `FakeCore` behind a real `EngineServer`, `FakeEngine` in its place.

Both are deterministic and keep the contract of the real ones: limits, refusals, usage, cached
prefixes per salt, aborts, a loss of the peer. Knows no torch; the token ids are drawn from a hash
or scripted by the caller.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import struct
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path

import msgspec

from engine.config import BLOCK_SIZE, EngineConfig, ResolvedConfig
from engine.errors import (
    DeadlineExceeded,
    EngineOverloaded,
    EngineUnavailable,
    InvalidRequest,
    TakenBack,
)
from engine.fairness import INPUT_COST, LANE_WEIGHTS, OUTPUT_COST, FairShare, QueueBound
from engine.fake.prefix_cache import FakeCache
from engine.kv_cache.cache_events import CacheEvents
from engine.kv_cache.prefix_leases import LeaseEvent
from engine.protocol import (
    PROTOCOL_VERSION,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Lane,
    LaneStatus,
    ReplicaStatus,
    SeenPrefix,
    StepCosts,
    TokenLogprob,
    TokenLogprobs,
    Usage,
)
from engine.scheduling.lanes import queues_of
from engine.scheduling.queues import Deadlines, WaitingRoom
from engine.scheduling.validation import check_adapter, check_head, check_request
from engine.sequence import NOTHING_KEPT
from engine.transport.client import OnLease, OnOrphan
from engine.transport.output_streams import OutputStream, Take

Respond = Callable[[EngineRequest, int], Iterator[int]]
"""The token ids of choice `index` of a request. Where they end the choice has met its EOS."""

FAKE_CONFIG = EngineConfig(model=Path("fake"), max_model_len=4096, num_blocks=4096)
EOS_TOKEN_ID = 0
EMBEDDING_SIZE = 16
STEP_TIMEOUT_S = 30.0


def drawn(request: EngineRequest, index: int, *, vocab_size: int = 1024) -> Iterator[int]:
    """An endless answer drawn from prompt, seed and choice; never the EOS."""
    root = repr((request.prompt_token_ids, request.sampling.seed, index)).encode()
    for position in count():
        digest = hashlib.blake2b(root + position.to_bytes(8), digest_size=8).digest()
        yield 1 + int.from_bytes(digest) % (vocab_size - 1)


def embedding(request: EngineRequest) -> bytes:
    """A vector of unit length drawn from the prompt, as `EngineOutput.embedding`."""
    root = repr(request.prompt_token_ids).encode()
    digest = hashlib.blake2b(root, digest_size=EMBEDDING_SIZE).digest()
    numbers = [byte - 127.5 for byte in digest[: request.dimensions]]
    length = math.hypot(*numbers)
    return struct.pack(f"<{len(numbers)}f", *(number / length for number in numbers))


def named(token_id: int, token_ids: Sequence[int]) -> TokenLogprobs:
    """The token, and those that were asked for by name."""
    return TokenLogprobs(
        TokenLogprob(token_id, -0.5),
        [TokenLogprob(each, -0.5 if each == token_id else -2.0 - each) for each in token_ids],
    )


def likeliest(token_id: int, num_top: int) -> TokenLogprobs:
    """The token, and others behind it."""
    chosen = TokenLogprob(token_id, -0.5)
    others = (other for other in count(1) if other != token_id)
    top = [chosen, *(TokenLogprob(next(others), -1.0 - rank) for rank in range(num_top))]
    return TokenLogprobs(chosen, top[:num_top], 1)


class _FakeRequest:
    """One request and the state of its choices."""

    def __init__(
        self, request: EngineRequest, number: int, respond: Respond, max_model_len: int
    ) -> None:
        self.request = request
        self.turn = (request.priority, number, 0)
        self.lane, self.tenant = request.lane, request.tenant
        self.num_tokens = self.num_found = 0
        self.deadline_s = math.inf
        self.is_paused = False
        self.alone = [
            msgspec.structs.replace(request, prompt_token_ids=prompt, more_prompts=())
            for prompt in request.prompts
        ]
        """Requests that each of its prompts would make by itself."""
        self.max_tokens = [
            min(request.sampling.max_tokens, max_model_len - len(prompt))
            for prompt in request.prompts
        ]
        self.answers = [respond(each, i) for each in self.alone for i in range(request.n)]
        self.lengths = [0] * len(self.answers)
        self.said = [len(output) for output in request.said] or self.lengths.copy()
        """How much of each answer another engine has said."""
        for answer, num_said in zip(self.answers, self.said, strict=True):
            next(islice(answer, num_said, num_said), None)
        self.open = set(range(len(self.answers))) - set(request.ended)
        self.answering = sorted({index // request.n for index in self.open})
        """The prompts that have a choice which is open."""
        self.num_tokens = sum(len(request.prompts[number]) for number in self.answering)
        self.cached_of = dict.fromkeys(self.answering, 0)
        """The cached tokens of each of these."""
        self.told: list[int] = []
        """Those of which a first token, or the embedding, was told."""
        self.resumed_tokens = 0
        self.kept = NOTHING_KEPT
        self.seen: SeenPrefix | None = None
        self.prefilled = False

    @property
    def usage(self) -> Usage:
        counted = self.told or self.answering
        return Usage(
            prompt_tokens=sum(len(self.request.prompts[number]) for number in counted),
            resumed_tokens=self.resumed_tokens,
            cached_tokens=sum(self.cached_of[number] for number in counted),
            kept_tokens=self.kept.kept_tokens,
            written_tokens=self.kept.written_tokens,
            seen=self.seen,
            generated_tokens=sum(self.lengths),
            prefilled=self.prefilled,
        )

    @property
    def max_blocks(self) -> int:
        """Return how many blocks its choices may come to hold; set aside whole, so that nothing is
        preempted.
        """
        lengths = zip(self.request.prompts, self.max_tokens, strict=True)
        per_choice = sum(-(-(len(prompt) + most) // BLOCK_SIZE) for prompt, most in lengths)
        return self.request.n * per_choice

    def step(self) -> list[EngineOutput]:
        self.prefilled = True
        if self.request.embed:
            return [
                msgspec.structs.replace(last, embedding=embedding(alone))
                for last, alone in zip(self.end("stop"), self.alone, strict=True)
            ]
        return [self._advance(index) for index in sorted(self.open)]

    def end(self, reason: FinishReason) -> list[EngineOutput]:
        return [
            EngineOutput(
                request_id=self.request.request_id,
                usage=self.usage,
                index=index,
                finish_reason=reason,
                finished=index == max(self.open),
            )
            for index in sorted(self.open)
        ]

    def _advance(self, index: int) -> EngineOutput:
        token_id = next(self.answers[index], EOS_TOKEN_ID)
        self.lengths[index] += 1
        if (number := index // self.request.n) not in self.told:
            self.told.append(number)
        if self.lengths[index] == 1:
            self.resumed_tokens += self.said[index]
        reason = self._finish_reason(index, token_id)
        if reason is not None:
            self.open.remove(index)
        return EngineOutput(
            request_id=self.request.request_id,
            usage=self.usage,
            index=index,
            token_ids=[token_id],
            logprobs=self._logprobs(token_id),
            prompt_logprobs=self._prompt_logprobs(index) if self.lengths[index] == 1 else None,
            finish_reason=reason,
            finished=not self.open,
        )

    def _finish_reason(self, index: int, token_id: int) -> FinishReason | None:
        sampling, length = self.request.sampling, self.said[index] + self.lengths[index]
        is_eos = token_id == EOS_TOKEN_ID and not sampling.ignore_eos
        if length >= sampling.min_tokens and (is_eos or token_id in sampling.stop_token_ids):
            return "stop"
        return "length" if length >= self.max_tokens[index // self.request.n] else None

    def _logprobs(self, token_id: int) -> list[TokenLogprobs] | None:
        sampling = self.request.sampling
        if sampling.logprobs is None:
            return None
        if sampling.logprob_token_ids:
            return [named(token_id, sampling.logprob_token_ids)]
        return [likeliest(token_id, sampling.logprobs)]

    def _prompt_logprobs(self, index: int) -> list[TokenLogprobs] | None:
        asked, n = self.request.sampling.prompt_logprobs, self.request.n
        if asked is None or index % n:
            return None
        said = self.request.prompts[index // n][1:]
        return [likeliest(token_id, asked) for token_id in said]


class FakeCore:
    """`EngineCore` without a model: one token per choice and step, prompts cost one step."""

    def __init__(
        self,
        config: EngineConfig = FAKE_CONFIG,
        *,
        vocab_size: int = 1024,
        respond: Respond = drawn,
        generates: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resolved = ResolvedConfig(
            config=config,
            served_name=config.served_name or config.model.name,
            device="cpu",
            dtype="float32",
            max_model_len=config.max_model_len or 4096,
            vocab_size=vocab_size,
            eos_token_ids=(EOS_TOKEN_ID,),
            sliding_window=None,
            num_blocks=config.num_blocks or 4096,
            kv_bytes_per_token=0,
            step_timeout_s=config.step_timeout_s or STEP_TIMEOUT_S,
            max_steps_in_flight=1,
            embedding_size=EMBEDDING_SIZE,
            identities={name: f"{config.model} {name}" for name in ("", *config.adapters)},
            generates=generates,
        )
        self._respond = respond
        self._clock = clock
        self._share = FairShare()
        self._waiting: WaitingRoom[_FakeRequest] = WaitingRoom(self._share, self._num_cached)
        self._deadlines = Deadlines(self._waits_until)
        self._queued: dict[str, _FakeRequest] = {}
        """Those that wait, and those that would if they were not paused."""
        self._running: dict[str, _FakeRequest] = {}
        self._num_arrived = 0
        self._cache = FakeCache(self.resolved, clock)
        self._num_steps = self._generated = 0
        self._engine_id = str(uuid.uuid4())
        self.costs = StepCosts()
        """The costs of its steps, as it tells them."""

    def prepare(self, request: EngineRequest) -> None:
        """Grammars are about texts, and here is none."""
        if request.sampling.grammar is not None:
            raise InvalidRequest("grammar is not supported without a model", param="grammar")

    def add(self, request: EngineRequest) -> None:
        resolved = self.resolved
        check_head(request, generates=resolved.generates, embedding_size=resolved.embedding_size)
        check_request(request, vocab_size=resolved.vocab_size, max_model_len=resolved.max_model_len)
        check_adapter(request, resolved.config.adapters)
        self.prepare(request)
        queue = self._queue_of(request.lane)
        if not queue.has_room(request.tenant):
            raise EngineOverloaded(f"{queue.num_taken} requests wait in lane {request.lane}")
        number, max_model_len = self._num_arrived, self.resolved.max_model_len
        fake = _FakeRequest(request, number, self._respond, max_model_len)
        if fake.max_blocks > self.resolved.num_blocks:
            raise InvalidRequest("n choices of this length never fit", param="n")
        self._num_arrived += 1
        self._queued[request.request_id] = fake
        self._share.enter(fake.lane, fake.tenant)
        self._waiting.add(fake)
        if request.deadline_s is not None:
            fake.deadline_s = self._clock() + request.deadline_s
            self._deadlines.add(fake.deadline_s, request.request_id, len(self._queued))

    def abort(self, request_id: str) -> list[EngineOutput]:
        if fake := self._running.pop(request_id, None):
            self._share.leave(fake.lane, fake.tenant)
            return fake.end("abort")
        if fake := self._queued.pop(request_id, None):
            self._waiting.remove(fake)
            self._share.leave(fake.lane, fake.tenant)
            return fake.end("abort")
        return []

    def take_back(self, request_id: str) -> bool:
        is_queued = request_id in self._queued
        if is_queued:
            self.abort(request_id)
        return is_queued

    def pause(self, request_id: str) -> None:
        fake = self._running.get(request_id) or self._queued.get(request_id)
        if fake is not None:
            fake.is_paused = True
            self._waiting.remove(fake)

    def resume(self, request_id: str) -> None:
        fake = self._running.get(request_id) or self._queued.get(request_id)
        if fake is not None and fake.is_paused:
            fake.is_paused = False
            if request_id in self._queued:
                self._waiting.add(fake)

    def expire(self) -> list[str]:
        self._cache.leases.expire()
        expired = self._deadlines.passed(self._clock())
        for request_id in expired:
            self.abort(request_id)
        return expired

    def take_lease_events(self) -> list[LeaseEvent]:
        return self._cache.keeping.take_events()

    @property
    def cache_events(self) -> CacheEvents:
        return self._cache.events

    def step(self) -> list[EngineOutput]:
        while (fake := self._waiting.first()) is not None and self._fits(fake):
            self._start(fake)
        stepping = [fake for fake in self._running.values() if not fake.is_paused]
        outputs = [output for fake in stepping for output in fake.step()]
        for output in outputs:
            self._generated += len(output.token_ids)
            fake = self._running[output.request_id]
            self._charge(fake, OUTPUT_COST * len(output.token_ids))
            if output.finished:
                del self._running[output.request_id]
                self._share.leave(fake.lane, fake.tenant)
        self._num_steps += 1
        return outputs

    def has_work(self) -> bool:
        return len(self._waiting) > 0 or any(not f.is_paused for f in self._running.values())

    def status(self) -> ReplicaStatus:
        held = self._num_held_blocks()
        return ReplicaStatus(
            model=self.resolved.served_name,
            protocol_version=PROTOCOL_VERSION,
            max_model_len=self.resolved.max_model_len,
            vocab_size=self.resolved.vocab_size,
            eos_token_ids=list(self.resolved.eos_token_ids),
            block_size=BLOCK_SIZE,
            num_blocks=self.resolved.num_blocks,
            num_free_blocks=self.resolved.num_blocks - held,
            num_running=len(self._running),
            num_waiting=len(self._queued),
            kv_cache_usage=held / self.resolved.num_blocks,
            num_leased_blocks=self._cache.leases.num_blocks,
            prefix_cache_query_tokens=self._cache.num_queried,
            prefix_cache_hit_tokens=self._cache.num_hit,
            num_preemptions=0,
            num_steps=self._num_steps,
            generated_tokens=self._generated,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            engine_id=self._engine_id,
            step_timeout_s=self.resolved.step_timeout_s,
            embedding_size=self.resolved.embedding_size,
            generates=self.resolved.generates,
            lanes={lane: self._lane(lane) for lane in LANE_WEIGHTS},
            num_cached_blocks=self._cache.num_cached_blocks,
            costs=self.costs,
            max_step_tokens=self.resolved.config.max_num_batched_tokens,
            identities=self.resolved.identities,
        )

    def _lane(self, lane: Lane) -> LaneStatus:
        return LaneStatus(
            num_running=sum(fake.lane == lane for fake in self._running.values()),
            num_waiting=(queue := self._queue_of(lane)).num_taken,
            waiting_tokens=self._waiting.num_tokens[lane],
            waiting_pairs=self._waiting.num_pairs[lane],
            num_queued=queue.num_taken,
            max_queued=queue.most,
        )

    def _queue_of(self, lane: Lane) -> QueueBound:
        queue = QueueBound(queues_of(self.resolved.config)[lane])
        for fake in self._queued.values():
            if fake.lane == lane:
                queue.take(fake.tenant)
        return queue

    def check_integrity(self) -> None:
        assert self._num_held_blocks() <= self.resolved.num_blocks
        assert all(fake.open for fake in self._running.values())
        self._waiting.check_integrity([f for f in self._queued.values() if not f.is_paused])

    def _start(self, fake: _FakeRequest) -> None:
        del self._queued[fake.request.request_id]
        self._waiting.remove(fake)
        self._running[fake.request.request_id] = fake
        for number in fake.answering:
            found = self._cache.look_up(fake.alone[number])
            fake.kept, fake.seen = found.kept, fake.seen if number else found.seen
            fake.cached_of[number] = found.cached_tokens
        self._charge(fake, INPUT_COST * (fake.num_tokens - sum(fake.cached_of.values())))

    def _num_cached(self, fake: _FakeRequest) -> int:
        alone = (fake.alone[number] for number in fake.answering)
        return sum(map(self._cache.num_cached_tokens, alone))

    def _charge(self, fake: _FakeRequest, cost: int) -> None:
        self._share.charge(fake.lane, fake.tenant, fake.request.weight, cost)

    def _waits_until(self, request_id: str, deadline_s: float) -> bool:
        fake = self._queued.get(request_id)
        return fake is not None and fake.deadline_s == deadline_s

    def _fits(self, fake: _FakeRequest) -> bool:
        return (
            len(self._running) < self.resolved.config.max_num_seqs
            and self._num_held_blocks() + fake.max_blocks <= self.resolved.num_blocks
        )

    def _num_held_blocks(self) -> int:
        return sum(fake.max_blocks for fake in self._running.values())


class FakeEngine:
    """An `Engine` in this process, without a socket. `delay_s` passes before every step, by way of
    `sleep`, so that a test owns the time."""

    def __init__(
        self,
        core: FakeCore | None = None,
        *,
        delay_s: float = 0.0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        on_orphan: OnOrphan | None = None,
        on_lease: OnLease | None = None,
    ) -> None:
        self.core = core or FakeCore()
        self.on_orphan, self.on_lease = on_orphan, on_lease
        self.connected = True
        self.is_silent = False
        self.acknowledged: list[str] = []
        self._delay_s = delay_s
        self._sleep = sleep
        self._streams: dict[str, OutputStream] = {}
        self._stepping: asyncio.Task[None] | None = None

    @property
    def status(self) -> ReplicaStatus:
        return self.core.status()

    async def wait_connected(self, timeout_s: float) -> ReplicaStatus:
        if not self.connected:
            await self._sleep(timeout_s)
        self._require_connected()
        return self.status

    async def generate(
        self, request: EngineRequest, take: Take | None = None, *, at_once: bool = False
    ) -> AsyncGenerator[EngineOutput, None]:
        self._require_connected()
        request_id = request.request_id
        if request_id in self._streams:
            raise InvalidRequest("request_id is in use", param="request_id")
        self.core.add(request)
        stream = self._streams[request_id] = OutputStream(take)
        self._turn()
        try:
            while not stream.finished:
                yield await stream.next()
        finally:
            del self._streams[request_id]
            self.core.abort(request_id)

    async def abort(self, request_id: str) -> None:
        for last in self.core.abort(request_id):
            self._streams[request_id].push(last)

    def take_back(self, request_id: str) -> None:
        if request_id in self._streams and self.core.take_back(request_id):
            self._streams[request_id].fail(TakenBack("taken back before it was begun"))

    async def pause(self, request_id: str) -> None:
        self.core.pause(request_id)

    async def resume(self, request_id: str) -> None:
        self.core.resume(request_id)
        self._turn()

    def leave(self, request_id: str) -> None:
        if request_id in self._streams:
            self.core.abort(request_id)
            self._streams[request_id].fail(EngineUnavailable("the fake engine is silent"))

    async def acknowledge(self, request_id: str) -> None:
        self.acknowledged.append(request_id)

    async def close(self) -> None:
        self.lose()
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)

    def lose(self) -> None:
        """As if the engine's process died: open streams raise `EngineUnavailable`."""
        self.connected = False
        for request_id, stream in self._streams.items():
            self.core.abort(request_id)
            stream.fail(EngineUnavailable("the fake engine was lost"))

    def restore(self) -> None:
        """As if it was started again."""
        self.connected = True

    def _require_connected(self) -> None:
        if not self.connected:
            raise EngineUnavailable("the fake engine was lost")

    def _turn(self) -> None:
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())

    async def _step(self) -> None:
        try:
            while self.core.has_work():
                await self._sleep(self._delay_s)
                for request_id in self.core.expire():
                    expired = DeadlineExceeded("its deadline passed before it was begun")
                    self._streams[request_id].fail(expired)
                outputs = self.core.step()
                enough = {o.request_id for o in outputs if self._streams[o.request_id].push(o)}
                for request_id in enough:
                    await self.abort(request_id)
                for event in self.core.take_lease_events():
                    if self.on_lease is not None:
                        await self.on_lease(event)
        except Exception:  # a bug in the script or in here: told to the streams, and raised
            self.lose()
            raise
