"""The scheduler under random traffic over few blocks: every step is checked against an oracle.

With `ahead`, each step is scheduled while the one before still runs, as on a device. With drafts,
decodes carry guesses, some of them right. Some requests embed: their vector stands for the text
that the model saw, and a mean's for all tokens that it was given in one go from the start."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.config import Pooling
from engine.protocol import EngineOutput, EngineRequest, FinishReason, Usage
from engine.schedule import ScheduledSequence, SchedulerOutput
from engine.scheduler import Scheduler
from engine.sequence import SampledTokens, Sequence, SequenceStatus
from tests.engine.scheduling import EOS, Clock, embedding, make, request

Key = tuple[str, int]
PROMPTS = [[10, 11, 12, 13, 14, 15, 16, 17, 18, 19] * 2, [10, 11, 12, 13] * 5, [30] * 20]


@dataclass
class Expected:
    """What one request may still say, known from outside."""

    asked: EngineRequest
    max_tokens: int
    deadline: int
    """The step by which it must have ended."""
    said: list[list[int]] = field(default_factory=list)
    reasons: list[FinishReason | None] = field(default_factory=list)
    usage: Usage | None = None

    def finish_reason(self, index: int) -> FinishReason | None:
        if self.asked.embed:
            return "stop"
        sampling, said = self.asked.sampling, self.said[index]
        stops = {*sampling.stop_token_ids} | (set() if sampling.ignore_eos else {EOS})
        if said[-1] in stops and len(said) >= sampling.min_tokens:
            return "stop"
        return "length" if len(said) == self.max_tokens else None


class World:
    """A scheduler, a model whose KV cache holds texts, and the oracle.

    The model writes, for every position it computes, the whole text up to there into the slot
    that the block table names; and it reads every slot that the position attends to. A block that
    was freed too early, shared wrongly or never computed shows as a text that is not the reader's.
    """

    def __init__(
        self, scheduler: Scheduler, clock: Clock, *, ahead: bool = False, drafts: bool = False
    ) -> None:
        self.scheduler, self.clock = scheduler, clock
        self.ahead, self.drafts = ahead, drafts
        self.memory: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.open: dict[str, Expected] = {}
        self.ended: set[str] = set()
        self.num_steps = 0
        self.launched: list[tuple[SchedulerOutput, dict[Key, SampledTokens], dict[Key, bytes]]] = []
        self.sums: dict[Sequence, list[int]] = {}
        """What a runner adds up: here it is listed."""
        self.num_accepted = self.num_dropped = self.num_embedded = 0

    def add(self, asked: EngineRequest) -> None:
        scheduler = self.scheduler
        ahead = scheduler.num_running + scheduler.num_waiting + asked.n + scheduler.max_num_seqs
        scheduler.add(asked)
        room = scheduler.max_model_len - len(asked.prompt_token_ids)
        # The earliest running sequence computes a token at every step and is through after
        # max_model_len; each sequence ahead can be that once, and so can those that started
        # while a second choice waited for its first.
        self.open[asked.request_id] = Expected(
            asked,
            max_tokens=min(room, asked.sampling.max_tokens),
            deadline=self.num_steps + ahead * scheduler.max_model_len,
            said=[[] for _ in range(asked.n)],
            reasons=[None] * asked.n,
        )

    def step(self, draw: Callable[[], int]) -> None:
        """One step that works; `draw` samples."""
        if self.drafts:
            for seq in self.scheduler._running:
                seq.draft_token_ids = [draw() for _ in range(draw())]
        output = self.schedule()
        sampled, embedded = {}, {}
        for entry in output.scheduled:
            said = self.compute(entry, draw)
            if entry.samples:
                sampled[entry.key] = said
            if entry.embeds:
                embedded[entry.key] = self.embed(entry)
            elif entry.seq.pooling == "mean":
                self.add_up(entry)
        if output.scheduled:
            self.launched.append((output, sampled, embedded))
        if not self.ahead or not output.scheduled or len(self.launched) > 1:
            self.take_in()

    def take_in(self) -> None:
        """The oldest step in flight ends."""
        if not self.launched:
            return
        output, sampled, embedded = self.launched.pop(0)
        standing = {
            s.key
            for s in output.scheduled
            if (s.samples or s.embeds) and s.seq.status is SequenceStatus.RUNNING
            if s.seq.num_preemptions == s.attempt
        }
        answers = self.scheduler.update(output, sampled, embedded)
        assert {(a.request_id, a.index) for a in answers} == standing
        self.num_dropped += len(sampled) + len(embedded) - len(answers)
        for answer in answers:
            if answer.embedding is not None:
                assert embedded[answer.request_id, 0] == answer.embedding
                self.num_embedded += 1
                self.hear(answer)
                continue
            said = [token_id for token_id, _ in sampled[answer.request_id, answer.index]]
            assert answer.token_ids == said[: len(answer.token_ids)]
            assert answer.finish_reason is not None or answer.token_ids == said
            self.hear(answer)

    def fail(self) -> None:
        """One step that raises after it has overwritten what it was given."""
        self.take_in()
        output = self.schedule()
        size = self.scheduler.cache.block_size
        for entry in output.scheduled:
            for position in range(entry.start, entry.start + entry.num_new_tokens):
                block = entry.seq.block_table[position // size]
                self.memory[block, position % size] = ("garbage", ())
        answers = self.scheduler.fail_batch(output)
        assert {a.request_id for a in answers} == {s.seq.request_id for s in output.scheduled}
        assert all(answer.error_code == "engine_step_failed" for answer in answers)
        for request_id in {answer.request_id for answer in answers}:
            self.end([a for a in answers if a.request_id == request_id], "error")

    def abort(self, request_id: str) -> None:
        answers = self.scheduler.abort(request_id)
        assert {answer.request_id for answer in answers} == {request_id}
        self.end(answers, "abort")
        assert self.scheduler.abort(request_id) == []

    def schedule(self) -> SchedulerOutput:
        """One schedule(), held to the rules that need no memory."""
        scheduler = self.scheduler
        running = list(scheduler._running)
        output = scheduler.schedule()
        self.num_steps += 1
        self.clock.now += 1.0
        entries = output.scheduled
        assert bool(entries) == bool(self.open) or self.launched, "work is done while there is any"
        assert output.num_tokens == sum(s.num_new_tokens for s in entries)
        assert output.num_tokens <= scheduler.max_num_batched_tokens
        assert len({s.seq.order for s in entries}) == len(entries) <= scheduler.max_num_seqs
        kinds = [
            (s.samples or s.embeds) and s.num_new_tokens == 1 + len(s.draft_token_ids)
            for s in entries
            if s.seq in running
        ]
        assert all(a >= b for a, b in pairwise(kinds)), "those that lack one token first"
        kept = [s for s in running if s not in output.preempted]
        for victim in output.preempted:
            assert all(victim.order > s.order for s in kept), "not the latest"
            assert victim.status is SequenceStatus.WAITING, "a victim came back in its own step"
        if kept and not self.launched:
            assert any(s.seq is kept[0] for s in entries), "the earliest must move"
        scheduler.check_integrity()
        return output

    def compute(self, entry: ScheduledSequence, draw: Callable[[], int]) -> SampledTokens:
        """Write and read the cache as attention does; what is sampled, drafts verified."""
        seq, size = entry.seq, self.scheduler.cache.block_size
        window = self.scheduler.cache.sliding_window
        ahead = self.pending(seq)
        stop = entry.start + entry.num_new_tokens
        text = tuple(seq.token_ids) + tuple(ahead) + tuple(entry.draft_token_ids)
        assert entry.num_new_tokens >= 1
        assert entry.output_index == seq.num_output_tokens + len(ahead)
        assert entry.samples == (stop == len(text) and not seq.embeds)
        assert entry.embeds == (stop == len(text) and seq.embeds)
        known = min(stop, seq.num_tokens)
        assert tuple(seq.tokens(entry.start, known)) == text[entry.start : known]
        first = 0 if window is None else max(0, entry.start - window + 1)
        for position in range(first, stop):
            slot = (seq.block_table[position // size], position % size)
            mine = (seq.cache_salt, text[: position + 1])
            if position < entry.start:
                assert self.memory[slot] == mine, "attends to another text"
            else:
                self.memory[slot] = mine
        said = [draw()]
        for draft in entry.draft_token_ids:
            if said[-1] != draft:
                break
            said.append(draw())
            self.num_accepted += 1
        return [(token_id, None) for token_id in said]

    def add_up(self, entry: ScheduledSequence) -> list[int]:
        """Tokens of a mean so far."""
        seq = entry.seq
        if entry.start == 0:
            self.sums[seq] = []
        self.sums[seq] += seq.tokens(entry.start, entry.start + entry.num_new_tokens)
        return self.sums[seq]

    def embed(self, entry: ScheduledSequence) -> bytes:
        seq = entry.seq
        return vector(self.add_up(entry) if seq.pooling == "mean" else seq.token_ids)

    def pending(self, seq: Sequence) -> list[int]:
        """What steps in flight have sampled for `seq`, which the scheduler does not know yet."""
        return [
            token_id
            for output, sampled, _ in self.launched
            for entry in output.scheduled
            if entry.seq is seq and entry.samples and entry.attempt == seq.num_preemptions
            for token_id, _ in sampled[seq.request_id, seq.index]
        ]

    def hear(self, answer: EngineOutput) -> None:
        expected = self.open[answer.request_id]
        index = answer.index
        assert expected.reasons[index] is None, "a finished choice went on"
        expected.said[index] += answer.token_ids
        wanted = vector(expected.asked.prompt_token_ids) if expected.asked.embed else None
        assert answer.embedding == wanted
        expected.reasons[index] = answer.finish_reason
        assert answer.finish_reason == expected.finish_reason(index)
        self.bill(expected, answer)
        assert answer.usage.prefilled
        assert answer.finished == all(expected.reasons)
        if answer.finished:
            self.ended.add(answer.request_id)
            del self.open[answer.request_id]

    def end(self, answers: list[EngineOutput], reason: FinishReason) -> None:
        expected = self.open.pop(answers[0].request_id)
        self.ended.add(answers[0].request_id)
        still_open = [index for index, ended in enumerate(expected.reasons) if ended is None]
        assert [answer.index for answer in answers] == still_open, "one for each open choice"
        assert [answer.finished for answer in answers] == [False] * (len(answers) - 1) + [True]
        for answer in answers:
            assert answer.finish_reason == reason and not answer.token_ids
            assert answer.embedding is None
            self.bill(expected, answer)

    def bill(self, expected: Expected, answer: EngineOutput) -> None:
        usage, before = answer.usage, expected.usage
        assert usage.prompt_tokens == len(expected.asked.prompt_token_ids)
        assert usage.generated_tokens == sum(map(len, expected.said))
        assert 0 <= usage.cached_tokens < usage.prompt_tokens
        assert usage.prefilled == (usage.generated_tokens > 0 or answer.embedding is not None)
        if expected.asked.embed and self.scheduler._pooling == "mean":
            assert usage.cached_tokens == 0
        if before is not None:
            assert usage.cached_tokens == before.cached_tokens
            assert usage.queue_time_s == before.queue_time_s
            assert usage.prefill_time_s == before.prefill_time_s
            assert usage.first_token_time_s == before.first_token_time_s
        expected.usage = usage

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert scheduler.has_unfinished() == bool(self.open)
        for request_id, expected in self.open.items():
            assert self.num_steps <= expected.deadline, f"{request_id} starves"
        if not self.open and not self.launched:
            assert scheduler.num_running == scheduler.num_waiting == 0
            assert scheduler.num_free_blocks == scheduler.cache.pool.num_blocks

    def drain(self, draw: Callable[[], int]) -> None:
        """With nothing new arriving, all that is open ends; `check` bounds the loop."""
        while self.open or self.launched:
            self.step(draw)
            self.check()


def make_world(
    *,
    spare_blocks: int,
    window: int | None,
    enabled: bool,
    max_tokens: int,
    max_seqs: int,
    ahead: bool = False,
    drafts: bool = False,
    pooling: Pooling = "last",
) -> World:
    """As few blocks as the longest sequence needs, and `spare_blocks`. max_model_len is 40."""
    clock = Clock()
    bounds: dict[str, Any] = {
        "window": window,
        "enabled": enabled,
        "max_num_batched_tokens": max_tokens,
        "max_num_seqs": max_seqs,
        "max_model_len": 40,
        "max_waiting": 6,
        "clock": clock,
        "max_steps_in_flight": 2 if ahead else 1,
        "pooling": pooling,
    }
    least = make(1000, **bounds).max_blocks_per_seq
    return World(make(least + spare_blocks, **bounds), clock, ahead=ahead, drafts=drafts)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        options=st.fixed_dictionaries(
            {
                "spare_blocks": st.integers(0, 12),
                "window": st.one_of(st.none(), st.integers(1, 20)),
                "enabled": st.booleans(),
                "max_tokens": st.integers(1, 24),
                "max_seqs": st.integers(1, 6),
                "ahead": st.booleans(),
                "drafts": st.booleans(),
                "pooling": st.sampled_from(["last", "mean"]),
            }
        )
    )
    def start(self, options: dict[str, Any]) -> None:
        self.world = make_world(**options)
        self.num_requests = 0

    @precondition(lambda self: self.world.scheduler._num_queued < 6)
    @rule(
        text=st.sampled_from(PROMPTS),
        length=st.integers(1, 20),
        suffix=st.lists(st.integers(40, 41), max_size=3),
        salt=st.sampled_from(["", "", "org-2"]),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        max_tokens=st.integers(1, 40),
        min_tokens=st.integers(0, 4),
        ignore_eos=st.booleans(),
    )
    def add(
        self,
        text: list[int],
        length: int,
        suffix: list[int],
        salt: str,
        n: int,
        max_tokens: int,
        min_tokens: int,
        ignore_eos: bool,
    ) -> None:
        self.num_requests += 1
        self.world.add(
            request(
                f"r{self.num_requests}",
                text[:length] + suffix,
                salt=salt,
                n=n,
                max_tokens=max_tokens,
                min_tokens=min(min_tokens, max_tokens),
                ignore_eos=ignore_eos,
                stop_token_ids=(8,),
            )
        )

    @precondition(lambda self: self.world.scheduler._num_queued < 6)
    @rule(
        text=st.sampled_from(PROMPTS),
        length=st.integers(1, 20),
        suffix=st.lists(st.integers(40, 41), max_size=20),
        salt=st.sampled_from(["", "", "org-2"]),
    )
    def add_embedding(self, text: list[int], length: int, suffix: list[int], salt: str) -> None:
        self.num_requests += 1
        self.world.add(embedding(f"r{self.num_requests}", text[:length] + suffix, salt))

    @rule(seed=st.integers(0, 2**16), times=st.integers(1, 8))
    def steps(self, seed: int, times: int) -> None:
        draw = sampler(random.Random(seed))
        for _ in range(times):
            self.world.step(draw)
            self.world.check()

    @precondition(lambda self: self.world.open)
    @rule()
    def failing_step(self) -> None:
        self.world.fail()

    @precondition(lambda self: self.world.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.open))))

    @invariant()
    def checks(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain(sampler(random.Random(0)))
            assert self.world.ended == {f"r{i + 1}" for i in range(self.num_requests)}


def vector(token_ids: list[int]) -> bytes:
    return bytes(token_ids)


def sampler(rng: random.Random) -> Callable[[], int]:
    """Mostly one of two tokens, so that texts meet; now and then EOS or the stop token."""
    return lambda: rng.choices([1, 2, EOS, 8], weights=[60, 20, 2, 1])[0]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("window", "enabled", "spare_blocks"),
    [(None, True, 6), (None, False, 6), (7, True, 4), (None, True, 0)],
)
def test_a_thousand_steps_of_traffic(
    window: int | None, enabled: bool, spare_blocks: int, ahead: bool, drafts: bool
) -> None:
    traffic(1000, window, enabled, spare_blocks, ahead, drafts)


def test_ten_thousand_steps_of_traffic() -> None:
    traffic(10_000, None, True, 6, True, True)


def traffic(
    num_steps: int,
    window: int | None,
    enabled: bool,
    spare_blocks: int,
    ahead: bool,
    drafts: bool,
) -> None:
    """Random requests and aborts; the books are checked after every step."""
    rng = random.Random(f"{window} {enabled} {spare_blocks}")
    world = make_world(
        spare_blocks=spare_blocks,
        window=window,
        enabled=enabled,
        max_tokens=9,
        max_seqs=5,
        ahead=ahead,
        drafts=drafts,
        pooling="mean" if drafts else "last",
    )
    draw, num_requests = sampler(rng), 0
    while world.num_steps < num_steps:
        while world.scheduler._num_queued < 4 and rng.random() < 0.4:
            num_requests += 1
            prompt = rng.choice(PROMPTS)[: rng.randint(1, 20)] + [40] * rng.randint(0, 3)
            if rng.random() < 0.2:
                long = prompt + [41] * rng.randint(0, 17)
                world.add(embedding(f"r{num_requests}", long, rng.choice(["", "org-2"])))
                continue
            world.add(
                request(
                    f"r{num_requests}",
                    prompt,
                    n=rng.choice([1, 1, 1, 3]),
                    max_tokens=rng.randint(1, 40),
                    salt=rng.choice(["", "org-2"]),
                )
            )
        if world.open and rng.random() < 0.01:
            world.abort(rng.choice(sorted(world.open)))
        if rng.random() < 0.005:
            world.fail()
        world.step(draw)
        world.check()
    world.drain(draw)
    scheduler = world.scheduler
    assert world.ended == {f"r{i + 1}" for i in range(num_requests)}
    assert num_requests > num_steps // 20
    assert scheduler.num_preemptions > 0 or window is not None, "the pool was never short"
    assert (scheduler.prefix_cache_hit_tokens > 0) is enabled
    assert (world.num_accepted > 0) is drafts
    assert world.num_embedded > num_requests // 10
    assert world.num_dropped > 0 if ahead else world.num_dropped == 0
