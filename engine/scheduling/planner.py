"""A step's work: decodes, then chunks of prompts, then who starts; and who gives way for them.

Knows no requests and no results. Why it always comes to an end, `scheduler.py` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from engine.fairness import INPUT_COST, FairShare
from engine.kv_cache.prefix_cache import PrefixCache
from engine.protocol import Lane
from engine.scheduling.lanes import LaneLimits, Lanes
from engine.scheduling.pace import Pace
from engine.scheduling.prefix_loader import PrefixLoader
from engine.scheduling.queues import WaitingRoom
from engine.scheduling.running import RunningSequences
from engine.scheduling.step_plan import StepPlan
from engine.sequence import FREED, Sequence, SequenceStatus

LEAVE_SHARE = 4
"""A prompt that cannot be finished in a step leaves one part in so many to shorter ones behind."""
LOOK_BEHIND = 32
"""Waiting sequences looked at in search of a shorter one."""


class _Intake:
    """The findings of a step about those that wait."""

    __slots__ = ("beside", "has_started", "is_over", "num_needed")

    def __init__(self) -> None:
        self.beside: set[Lane] = set()
        """Lanes whose own limits keep them from starting more."""
        self.has_started = False
        self.is_over = False
        self.num_needed: int | None = None
        """Blocks that the running ones have yet to get; None: they are to be counted."""


class Planner:
    """Moves sequences between `waiting` and `running`, to and from which the scheduler brings and
    takes them."""

    def __init__(
        self,
        *,
        cache: PrefixCache,
        pace: Pace,
        share: FairShare,
        limits: Mapping[Lane, LaneLimits],
        max_waiting: Mapping[Lane, int],
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        penalties_ahead: bool,
        whole_prompts: bool,
        on_start: Callable[[Sequence], None],
        loader: PrefixLoader | None = None,
    ) -> None:
        """limits: of lanes. penalties_ahead: a token that is pending can be penalised for being
        said again. whole_prompts: none is cut into chunks.
        on_start: told of a sequence that was given its first blocks, before any of it is
        computed. loader: None: there are no tiers."""
        self.num_preemptions = 0
        self._cache = cache
        self._whole_prompts = whole_prompts
        self.share = share
        self.running = RunningSequences(self.share)
        self.waiting: WaitingRoom[Sequence] = WaitingRoom(self.share, cache.num_cached_tokens)
        self.lanes = Lanes(
            self.share,
            limits,
            max_waiting=max_waiting,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_blocks=cache.pool.num_blocks,
            max_blocks_per_seq=max_blocks_per_seq,
        )
        self._pace = pace
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_blocks_per_seq = max_blocks_per_seq
        self._penalties_ahead = penalties_ahead
        self._on_start = on_start
        self._loader = loader

    def plan(self, alone: Sequence | None = None) -> StepPlan:
        """The next step, its blocks given. Empty when nothing can be computed. `alone`: the
        sequence to have it for itself, running or waiting outside of `waiting`; None: nobody."""
        if alone is not None:
            return self._plan_alone(alone)
        step = StepPlan(self._max_num_batched_tokens)
        prompts = self._schedule_decodes(step)
        has_prompts = bool(prompts or self.waiting)
        num_decodes = len(step.scheduled)
        step.long_budget = self._pace.long_prompt_tokens(num_decodes, step.budget)
        step.budget = self._pace.prompt_tokens(num_decodes, step.budget)
        self._schedule_prompts(step, prompts)
        if not step.preempted:
            self._top_up(step)
        if has_prompts:
            step.pressed = self._pressed(step)
        return step

    @property
    def num_spare(self) -> int:
        """Blocks that nobody holds and that the running ones will not need; O(running)."""
        return self._cache.num_available - sum(map(self._num_needed, self.running.active))

    def set_aside(self, seq: Sequence) -> None:
        """Take all that a running sequence has computed, and let it wait outside of `waiting`."""
        self.running.remove(seq)
        self.release(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1

    def release(self, seq: Sequence) -> None:
        """Give its blocks back. Steps in flight may still write to them: whoever gets the blocks
        writes later, in the order of the device."""
        self._cache.release(seq)
        seq.num_in_flight = seq.num_pending = 0
        seq.draft_token_ids = []

    def _plan_alone(self, seq: Sequence) -> StepPlan:
        """Plan a step of one sequence, at the cost of any other that runs. Empty while its step
        before is not over, or reads from a tier have the blocks that it needs: they soon end."""
        step = StepPlan(self._max_num_batched_tokens)
        if seq.status is not SequenceStatus.RUNNING:
            victims = [*self.running.halted[::-1], *self.running.active[::-1]]
            table = self._cache.match(seq)
            short = self._num_wanted(seq, table) - self.num_spare
            if not self._claim(step, victims, table, short):
                return step
            self._start(seq, self._cache.match(seq) if step.preempted else table)
        elif seq.num_missing == 0 or not self._goes_on(seq):
            return step
        num_new_tokens = min(seq.num_missing, step.budget)
        end = seq.num_computed_tokens + seq.num_in_flight + num_new_tokens
        while not self._cache.grow(seq, end):
            others = (*self.running.active, *self.running.halted)
            victim = next((each for each in reversed(others) if each is not seq), None)
            if victim is None:
                return step
            self._preempt(step, victim)
        self._put_chunk(step, seq, num_new_tokens)
        return step

    def _schedule_decodes(self, step: StepPlan) -> list[Sequence]:
        """Serve the sequences that lack one token, by precedence, and their drafts as far as there
        is room beside all of them; half of that is left to prompts, if there are any. Those that
        lack more are returned."""
        decodes, prompts = [], []
        for seq in self.running.active:
            missing = seq.num_missing
            if missing > 1:
                prompts.append(seq)
            elif missing == 1 and self._goes_on(seq):
                decodes.append(seq)
        room = max(0, step.budget - len(decodes))
        if len(decodes) > step.budget:
            decodes.sort(key=self._place)
        if self.waiting or prompts:
            room //= 2
        for seq in decodes:
            if step.budget == 0:
                break
            if seq.status is not SequenceStatus.RUNNING:
                continue  # preempted meanwhile
            start = seq.num_computed_tokens + seq.num_in_flight
            drafts = self._drafts(seq, room)
            if drafts and self._cache.grow(seq, start + 1 + len(drafts)):
                step.put(seq, 1, drafts)
                room -= len(drafts)
            elif self._make_room(step, seq, start + 1):
                step.put(seq, 1)
        return prompts

    def _place(self, seq: Sequence) -> tuple[float, int, float]:
        return self.share.place(seq.lane, seq.tenant)

    def _goes_on(self, seq: Sequence) -> bool:
        """Whether what is pending leaves anything to sample, and lets it be sampled now. A prompt
        to be embedded goes on to its end."""
        if seq.num_pending and seq.waits_for_pending(self._penalties_ahead):
            return False
        return seq.embeds or seq.num_output_tokens + seq.num_pending < seq.sampling.max_tokens

    def _drafts(self, seq: Sequence, room: int) -> list[int]:
        """The drafts worth verifying: the last token of all is never one."""
        if seq.num_pending or seq.embeds:
            return []
        left = seq.sampling.max_tokens - seq.num_output_tokens - 1
        return seq.draft_token_ids[: min(room, left)]

    def _schedule_prompts(self, step: StepPlan, prompts: list[Sequence]) -> None:
        """Serve the running sequences that lack more and start those that wait, in their turn: who
        runs already goes before those that wait with the same counters."""
        if len(prompts) > 1:
            prompts.sort(key=self._place)
        intake = _Intake()
        for index, seq in enumerate(prompts):
            if self.waiting:
                self._admit(step, intake, self._place(seq))
            if step.budget == 0:
                return
            if seq.status is not SequenceStatus.RUNNING:
                continue
            num_new_tokens = self._part(step, seq, prompts[index + 1 :])
            end = seq.num_computed_tokens + seq.num_in_flight + num_new_tokens
            if num_new_tokens and self._make_room(step, seq, end):
                self._put_chunk(step, seq, num_new_tokens)
                intake.num_needed = None
        self._admit(step, intake, None)

    def _put_chunk(self, step: StepPlan, seq: Sequence, num_new_tokens: int) -> None:
        step.put(seq, num_new_tokens)
        if seq.is_long:
            step.long_budget -= num_new_tokens
        charged = min(step.scheduled[seq.order].end, seq.num_prompt_tokens)
        if charged > seq.num_charged_tokens:
            tokens = INPUT_COST * (charged - seq.num_charged_tokens)
            self.share.charge(seq.lane, seq.tenant, seq.weight, tokens)
            seq.num_charged_tokens = charged

    def _part(self, step: StepPlan, seq: Sequence, behind: list[Sequence]) -> int:
        """Tokens of the budget for a prompt: all it can use of what is its lane's, but one that
        will not be through leaves a part to a shorter one behind it."""
        missing = seq.num_missing
        if self._whole_prompts:
            return missing if missing <= step.budget else 0
        room = self._room(step, seq.lane)
        if seq.is_long:
            room = max(0, min(room, step.long_budget))
        if missing <= room:
            return missing
        if not self._shorter_behind(missing, behind):
            return room
        return room - room // LEAVE_SHARE

    def _room(self, step: StepPlan, lane: Lane) -> int:
        most = self.lanes.max_tokens(lane)
        if most is None:
            return step.budget
        return max(0, min(step.budget, most - step.num_tokens_of(lane)))

    def _shorter_behind(self, missing: int, behind: list[Sequence]) -> bool:
        if any(1 < other.num_missing < missing for other in behind):
            return True
        if len(self.running) >= self._max_num_seqs:
            return False
        return self.waiting.any_shorter(missing, LOOK_BEHIND)

    def _top_up(self, step: StepPlan) -> None:
        """Give what nobody took back to the prompts, without preempting for it."""
        for entry in list(step.scheduled.values()):
            if step.budget == 0:
                return
            if not entry.answers:
                seq = entry.seq
                more = self._room(step, seq.lane)
                if seq.is_long:
                    more = max(0, min(more, step.long_budget))
                num_new_tokens = min(seq.num_missing, entry.num_new_tokens + more)
                if self._cache.grow(seq, entry.start + num_new_tokens):
                    step.remove(seq)
                    step.long_budget += entry.num_new_tokens * seq.is_long
                    self._put_chunk(step, seq, num_new_tokens)

    def _pressed(self, step: StepPlan) -> dict[Lane, int]:
        """Tokens that the step computes of prompts, of lanes that have more of them."""
        tokens: dict[Lane, int] = {}
        pressed = {lane for lane, waiting in self.waiting.num_tokens.items() if waiting}
        for entry in step.scheduled.values():
            if not entry.decodes:
                lane = entry.seq.lane
                tokens[lane] = tokens.get(lane, 0) + entry.num_new_tokens
                if not entry.answers:
                    pressed.add(lane)
        return {lane: tokens.get(lane, 0) for lane in pressed}

    def _make_room(self, step: StepPlan, seq: Sequence, num_tokens: int) -> bool:
        """Let the table of a running sequence cover `num_tokens`, at the cost of others. False when
        nobody gives way to it: it keeps its blocks and sits this step out."""
        while not self._cache.grow(seq, num_tokens):
            victim = self.running.victim_of(seq)
            if victim is None:
                return False
            self._preempt(step, victim)
        return True

    def _preempt(self, step: StepPlan, victim: Sequence) -> None:
        may_wait = victim not in self.running.halted
        self.set_aside(victim)
        self.num_preemptions += 1
        if may_wait:
            self.waiting.add(victim)
        step.take_back(victim)

    def _admit(
        self, step: StepPlan, intake: _Intake, until: tuple[float, int, float] | None
    ) -> None:
        """Start waiting sequences, strictly in their turn and before the place `until`, while all
        known tokens of the next fit beside what the running ones still need. Admitted on less, it
        would soon be preempted. Whom somebody was preempted for is the last."""
        while step.budget > 0 and not step.preempted and not intake.is_over:
            seq = self.waiting.first(beside=intake.beside)
            if seq is None:
                intake.is_over = True
            elif until is not None and self._place(seq) >= until:
                return
            elif (
                self.running.num_active[seq.lane] >= self.lanes.max_num_seqs[seq.lane]
                or self._room(step, seq.lane) == 0
            ):
                intake.beside.add(seq.lane)
            elif self._whole_prompts and seq.num_missing > step.budget:
                intake.is_over = True
            else:
                self._try_to_start(step, intake, seq)

    def _try_to_start(self, step: StepPlan, intake: _Intake, seq: Sequence) -> None:
        """Start the next one, or let a tier bring what it has of its prefix; or find that it, and
        so whoever is behind it, has to wait; where it is its lane's headroom that is in the way,
        only its lane has to."""
        if intake.num_needed is None:
            intake.num_needed = self._cache.num_available - self.num_spare
        victims = self.running.victims_of(seq.lane)
        if intake.has_started:  # nobody gives way in the step in which it started
            victims = self.running.halted[::-1]
        spare = self._cache.num_available - intake.num_needed
        is_full = len(self.running) >= self._max_num_seqs
        if (spare <= 0 and not victims) or (is_full and not self.running.halted):
            intake.is_over = True
            return
        table = self._cache.match(seq)
        if self._loader is not None and self._loader.begin(seq, table, spare):
            self.waiting.remove(seq)
            return
        short = self._num_wanted(seq, table) - spare
        if not self._claim(step, victims, table, short + self.lanes.headroom(seq.lane)):
            if short > 0:
                intake.is_over = True
            else:
                intake.beside.add(seq.lane)
            return
        if step.preempted:
            table = self._cache.match(seq)
        self._start(seq, table)
        num_new_tokens = max(1, self._part(step, seq, []))
        grown = self._cache.grow(seq, seq.num_computed_tokens + num_new_tokens)
        assert grown, "a chunk needs no more blocks than the whole"
        self._put_chunk(step, seq, num_new_tokens)
        intake.num_needed += self._num_needed(seq)
        intake.has_started = True

    def _claim(
        self, step: StepPlan, victims: list[Sequence], table: list[int], num_blocks: int
    ) -> bool:
        """Preempt as few as will do to find so many blocks beside those of `table`, and a place
        among the running. False, and nobody is, when all of them are not enough."""
        is_full = len(self.running) >= self._max_num_seqs
        if num_blocks <= 0 and not is_full:
            return True
        if num_blocks > 0 and num_blocks > sum(map(self._num_at_most, victims)):
            return False  # as at every step while a large one waits: without a look at each block
        taken, held, matched = 0, Counter[int](), set(table)
        while num_blocks > 0 and taken < len(victims):
            victim = victims[taken]
            num_blocks -= self._cache.num_released(victim, held, matched)
            if victim not in self.running.halted:
                num_blocks -= self._num_needed(victim)
            taken += 1
        if num_blocks > 0:
            return False
        if is_full:
            taken = max(taken, 1)
        for victim in victims[:taken]:
            self._preempt(step, victim)
        return True

    def _num_at_most(self, victim: Sequence) -> int:
        """Return what its end may leave to others: it holds some blocks, and some are kept for
        it.
        """
        return victim.num_held_blocks + self._num_needed(victim)

    def _num_wanted(self, seq: Sequence, table: list[int]) -> int:
        """Blocks that a waiting sequence has yet to get, on a matched table."""
        total = min(self._cache.num_blocks_for(seq.num_tokens), self._max_blocks_per_seq)
        if not table:
            return total
        num_held = len(table) - table.count(FREED)
        return total - num_held + self._cache.num_idle(table)

    def _num_needed(self, seq: Sequence) -> int:
        """Blocks a running sequence has yet to get: for its known tokens, and at least one."""
        total = min(self._cache.num_blocks_for(seq.num_tokens), self._max_blocks_per_seq)
        return max(1, total - seq.num_held_blocks)

    def _start(self, seq: Sequence, table: list[int]) -> None:
        """Move a waiting sequence to the running ones, on a matched table."""
        self.waiting.remove(seq)
        self.running.add(seq)
        seq.status = SequenceStatus.RUNNING
        self._cache.adopt(seq, table)
        seq.num_charged_tokens = max(seq.num_charged_tokens, seq.num_computed_tokens)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self._on_start(seq)
