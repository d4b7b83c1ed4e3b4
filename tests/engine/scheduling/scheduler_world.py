"""A scheduler, a model whose KV cache holds texts, and an oracle that checks every step of them.

With `ahead`, each step is scheduled while the one before still runs, as on a device. With drafts,
decodes carry guesses, some of them right. Some requests embed: their vector stands for the text
that the model saw, and a mean's for all tokens that it was given in one go from the start."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from engine.config import Pooling
from engine.fairness import LANE_RANKS
from engine.protocol import EngineOutput, EngineRequest, FinishReason, Lane, Usage
from engine.scheduling.lanes import LaneLimits
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_plan import ScheduledSequence, SchedulerOutput
from engine.sequence import SampledTokens, Sequence, SequenceStatus
from tests.engine.scheduling.scheduling import EOS, Clock, make

Key = tuple[str, int]
PROMPTS = [[10, 11, 12, 13, 14, 15, 16, 17, 18, 19] * 2, [10, 11, 12, 13] * 5, [30] * 20]


@dataclass
class Expected:
    """The output that one request may still give, known from outside."""

    asked: EngineRequest
    max_tokens: int
    deadline: float
    """The step by which it must have ended."""
    starts_by_s: float = math.inf
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
        self,
        scheduler: Scheduler,
        clock: Clock,
        *,
        ahead: bool = False,
        drafts: bool = False,
        lanes: bool = False,
    ) -> None:
        self.scheduler, self.clock = scheduler, clock
        self.lanes = lanes
        self.paused: set[str] = set()
        self.started: set[str] = set()
        self.num_expired = self.num_halted_victims = self.num_trials = 0
        self.ahead, self.drafts = ahead, drafts
        self.memory: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.open: dict[str, Expected] = {}
        self.ended: set[str] = set()
        self.num_steps = 0
        self.launched: list[tuple[SchedulerOutput, dict[Key, SampledTokens], dict[Key, bytes]]] = []
        self.sums: dict[Sequence, list[int]] = {}
        """The tokens of each sequence, listed where a runner would add them up."""
        self.num_accepted = self.num_dropped = self.num_embedded = 0

    def add(self, asked: EngineRequest) -> None:
        scheduler = self.scheduler
        ahead = scheduler.num_running + scheduler.num_waiting + asked.n + scheduler.max_num_seqs
        ahead += len(scheduler._on_trial)
        scheduler.add(asked)
        room = scheduler.max_model_len - len(asked.prompt_token_ids)
        # The earliest running sequence computes a token at every step and is through after
        # max_model_len; each sequence ahead can be that once, and so can those that started
        # while a second choice waited for its first.
        self.open[asked.request_id] = Expected(
            asked,
            max_tokens=min(room, asked.sampling.max_tokens),
            deadline=math.inf if self.lanes else self.num_steps + ahead * scheduler.max_model_len,
            starts_by_s=self.clock.now + (asked.deadline_s or math.inf),
            said=[[] for _ in range(asked.n)],
            reasons=[None] * asked.n,
        )

    def step(self, draw: Callable[[], int]) -> None:
        """One step that works; `draw` samples."""
        self.expire()
        if self.drafts:
            for seq in self.scheduler.running:
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

    def fail(self, *, tries_alone: bool = False) -> None:
        """One step that raises after it has overwritten what it was given. `tries_alone`: its
        requests are not ended."""
        self.take_in()
        output = self.schedule()
        size = self.scheduler.cache.block_size
        for entry in output.scheduled:
            for position in range(entry.start, entry.start + entry.num_new_tokens):
                block = entry.seq.block_table[position // size]
                self.memory[block, position % size] = ("garbage", ())
        if tries_alone:
            answers = self.scheduler.try_alone(output)
            for each in self.open.values():  # each sequence may have all its steps for itself
                each.deadline += len(output.scheduled) * self.scheduler.max_model_len
            for request_id in {answer.request_id for answer in answers}:
                self.end([a for a in answers if a.request_id == request_id], "error")
            return
        answers = self.scheduler.fail_batch(output)
        assert {a.request_id for a in answers} == {s.seq.request_id for s in output.scheduled}
        assert all(answer.error_code == "engine_step_failed" for answer in answers)
        for request_id in {answer.request_id for answer in answers}:
            self.end([a for a in answers if a.request_id == request_id], "error")

    def pause(self, request_id: str) -> None:
        for _ in range(2):
            self.scheduler.pause(request_id)
        self.paused.add(request_id)

    def resume(self, request_id: str) -> None:
        for _ in range(2):
            self.scheduler.resume(request_id)
        self.paused.discard(request_id)

    def expire(self) -> None:
        """Check that what was not begun in time goes, paused or not, and nothing else."""
        expected = {
            request_id
            for request_id, each in self.open.items()
            if each.starts_by_s <= self.clock.now and request_id not in self.started
        }
        expired = self.scheduler.expire()
        assert set(expired) == expected, (expired, expected)
        for request_id in expected:
            del self.open[request_id]
            self.ended.add(request_id)
            self.paused.discard(request_id)
        self.num_expired += len(expected)

    def abort(self, request_id: str) -> None:
        answers = self.scheduler.abort(request_id)
        assert {answer.request_id for answer in answers} == {request_id}
        self.end(answers, "abort")
        assert self.scheduler.abort(request_id) == []

    def take_back(self, request_id: str) -> None:
        """Check that what has not begun goes without an output, paused or not, and nothing else."""
        is_back = request_id not in self.started
        assert self.scheduler.take_back(request_id) == is_back
        if is_back:
            del self.open[request_id]
            self.ended.add(request_id)
            self.paused.discard(request_id)
        assert not self.scheduler.take_back("unknown")

    def schedule(self) -> SchedulerOutput:
        """One schedule(), held to the rules that need no memory."""
        scheduler = self.scheduler
        running = list(scheduler.running)
        halted = list(scheduler._running.halted)
        trial = scheduler._next_on_trial()
        output = scheduler.schedule()
        self.num_steps += 1
        self.clock.now += 1.0
        entries = output.scheduled
        runnable = self.open.keys() - self.paused
        loads = self.waits_for_tier()
        assert scheduler.has_work() == bool(runnable) or loads
        works = bool(entries) == bool(runnable)
        assert works or self.launched or loads, "work is done while there is any"
        self.started |= {s.seq.request_id for s in entries}
        assert not self.paused & {s.seq.request_id for s in entries}, "a paused one took a step"
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
            assert victim.status is SequenceStatus.WAITING, "a victim came back in its own step"
            if victim in halted:
                self.num_halted_victims += 1
                continue
            if trial is not None:
                continue  # anybody gives way to it
            mates = [s for s in kept if s.lane == victim.lane]
            assert all(victim.order > s.order for s in mates), "not the latest of its lane"
            assert not scheduler._running.halted, "who is halted gives way first"
            assert any(
                s.lane == victim.lane or LANE_RANKS[s.lane] < LANE_RANKS[victim.lane]
                for s in scheduler.running
            ), "nobody of a lower lane takes from a higher one"
        if trial is not None:
            assert {s.seq for s in entries} <= {trial}, "it is to have the step for itself"
            self.num_trials += bool(entries)
        elif kept and not self.launched and not self.lanes and not loads:
            assert any(s.seq is kept[0] for s in entries), "the earliest must move"
        scheduler.check_integrity()
        return output

    def waits_for_tier(self) -> bool:
        """Whether blocks are on their way to a tier or from it."""
        loader = self.scheduler._loader
        return loader is not None and bool(loader._loads or loader._done or loader.has_writes)

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
        """Return what steps in flight have sampled for `seq`, which the scheduler does not know
        yet.
        """
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
            self.paused.discard(answer.request_id)
            del self.open[answer.request_id]

    def end(self, answers: list[EngineOutput], reason: FinishReason) -> None:
        expected = self.open.pop(answers[0].request_id)
        self.ended.add(answers[0].request_id)
        self.paused.discard(answers[0].request_id)
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
        assert 0 <= usage.tier_tokens <= usage.cached_tokens
        if before is not None:
            assert usage.tier_tokens == before.tier_tokens
            assert usage.cached_tokens == before.cached_tokens
            assert usage.queue_time_s == before.queue_time_s
            assert usage.prefill_time_s == before.prefill_time_s
            assert usage.first_token_time_s == before.first_token_time_s
        expected.usage = usage

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert scheduler.has_unfinished() == bool(self.open)
        accounts = [
            account
            for each in scheduler._share._tenants.values()
            for account in each.accounts.values()
        ]
        assert sum(account.num_open for account in accounts) == sum(
            scheduler._lanes.num_open.values()
        )
        for request_id, expected in self.open.items():
            assert self.num_steps <= expected.deadline, f"{request_id} starves"
        if not self.open and not self.launched:
            assert scheduler.num_running == scheduler.num_waiting == 0
            assert scheduler.num_free_blocks == scheduler.cache.pool.num_blocks

    def drain(self, draw: Callable[[], int]) -> None:
        """With nothing new arriving, all that is open ends, in as many steps as it would take with
        one sequence after another, and as many again for what is computed twice."""
        for request_id in list(self.paused):
            self.resume(request_id)
        num_open = self.scheduler.num_running + self.scheduler.num_waiting
        last = self.num_steps + 2 * (num_open + 1) * self.scheduler.max_model_len
        while self.open or self.launched:
            self.step(draw)
            self.check()
            assert self.num_steps <= last, "it does not end"


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
    limits: dict[Lane, LaneLimits] | None = None,
) -> World:
    """As few blocks as the longest sequence needs, and `spare_blocks`. max_model_len is 40. limits:
    of lanes; None: all is of one."""
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
        "lane_limits": limits,
    }
    least = make(1000, **bounds).max_blocks_per_seq
    scheduler = make(least + spare_blocks, **bounds)
    return World(scheduler, clock, ahead=ahead, drafts=drafts, lanes=limits is not None)


def vector(token_ids: list[int]) -> bytes:
    return bytes(token_ids)


def sampler(rng: random.Random) -> Callable[[], int]:
    """Mostly one of two tokens, so that texts meet; now and then EOS or the stop token."""
    return lambda: rng.choices([1, 2, EOS, 8], weights=[60, 20, 2, 1])[0]
