"""Schedule, run, update; and, on a device that need not wait for its host, a step ahead.

Knows no configuration and no requests but through the scheduler.

With `max_steps_in_flight` of 1 a step is launched and collected at once. With 2, a step is launched
before the one before it is collected: the host schedules and builds tensors while the device works.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from engine.errors import GrammarExhausted
from engine.protocol import EngineOutput, StepCosts
from engine.runner.encoder_runner import EncoderRunner
from engine.runner.model_runner import LaunchedStep, ModelRunner, Sampled
from engine.runner.speculative.guesser import Guesser
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_costs import LearntCosts, StepWork
from engine.scheduling.step_plan import Embedded, ScheduledSequence, SchedulerOutput, Scored
from engine.sequence import Key

T = TypeVar("T")
logger = logging.getLogger(__name__)

DECODES_LEARNT = 8
"""One of so many steps without prompts teaches what it costs: they are many, and alike."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    output: SchedulerOutput
    parts: _Parts
    launched: LaunchedStep
    started_s: float
    is_usual: bool
    """Whether its time says what such a step takes."""


class Stepper:
    """Not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner | EncoderRunner,
        *,
        max_steps_in_flight: int = 1,
        guesser: Guesser | None = None,
    ) -> None:
        """A guesser must know what was said, so it excludes running ahead."""
        assert max_steps_in_flight == 1 or guesser is None, "guessing ahead of what is known"
        self.num_steps = 0
        self._learnt = LearntCosts()
        self._scheduler = scheduler
        self._runner = runner
        self._guesser = guesser
        self._max_in_flight = max_steps_in_flight
        self._in_flight: deque[_InFlight] = deque()
        self._collected_s = 0.0

    @property
    def num_draft_tokens(self) -> int:
        """Guesses that were verified so far."""
        return 0 if self._guesser is None else self._guesser.num_guessed

    @property
    def num_accepted_tokens(self) -> int:
        """Those that were right."""
        return 0 if self._guesser is None else self._guesser.num_right

    @property
    def costs(self) -> StepCosts:
        """Return what steps cost, as far as it is learnt."""
        return self._learnt.costs

    def has_work(self) -> bool:
        return self._scheduler.has_work() or bool(self._in_flight)

    def step(self) -> list[EngineOutput]:
        """Launch a step if there is one to launch, and collect the oldest if enough are in flight.

        Of a batch that raised each request is computed alone next. One whose step raises then, and
        those whose logits or vector are not finite or whose grammar gave up, end with finish_reason
        "error"; the next step knows nothing of it.
        """
        if self._guesser is not None:
            self._guesser.guess(self._scheduler.running)
        output = self._scheduler.schedule()
        if not output.scheduled:
            if self._in_flight:
                return self._collect()
            self._scheduler.wait()
            return []
        self.num_steps += 1
        started_s = time.perf_counter()
        parts, is_usual = _Parts.of(output), True
        if self._guesser is not None:
            is_usual = not self._guesser.fill(output, self._room_beside(output, parts))
        before = self._in_flight[-1].launched if self._in_flight else None
        try:
            launched = self._runner.launch(output, before)
        except Exception:
            return self._drain() + self._fail(output)
        self._in_flight.append(_InFlight(output, parts, launched, started_s, is_usual))
        return self._collect() if len(self._in_flight) >= self._max_in_flight else []

    def _drain(self) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        while self._in_flight:
            outputs += self._collect()
        return outputs

    def _collect(self) -> list[EngineOutput]:
        """Wait for the oldest step and take it in."""
        step = self._in_flight.popleft()
        output = step.output
        try:
            sampled = self._runner.collect(step.launched)
            embedded = self._runner.embedded(step.launched)
            scored = self._runner.scored(step.launched)
        except Exception:
            return self._fail(output)
        now_s = time.perf_counter()
        # A step launched behind another one began when that one ended.
        step_s = now_s - max(step.started_s, self._collected_s)
        self._collected_s = now_s
        self._learn(step, sampled, step_s)
        return self._take_in(output, sampled, embedded, scored)

    def _take_in(
        self, output: SchedulerOutput, sampled: Sampled, embedded: Embedded, scored: Scored
    ) -> list[EngineOutput]:
        lost = [
            entry
            for entry in output.scheduled
            if (entry.samples and entry.key not in sampled)
            or (entry.embeds and entry.key not in embedded)
            or (entry.num_scored and entry.key not in scored)
        ]
        if not lost:
            return self._scheduler.update(output, sampled, embedded, scored)
        given_up = [each for each in lost if each.seq.constraint and each.seq.constraint.gave_up]
        broken = [each for each in lost if each not in given_up]
        if broken:
            logger.error(
                "step %d: numbers of %d sequences not finite, of requests %s",
                *(self.num_steps, len(broken), self._scheduler.log_ids(broken)),
            )
        kept = [entry for entry in output.scheduled if entry not in lost]
        keys = {entry.key for entry in lost}
        outputs = self._scheduler.update(
            _part(output, kept),
            _without(keys, sampled),
            _without(keys, embedded),
            _without(keys, scored),
        )
        outputs += self._scheduler.fail_batch(_part(output, broken))
        return outputs + self._scheduler.fail_batch(_part(output, given_up), GrammarExhausted.code)

    def _fail(self, output: SchedulerOutput) -> list[EngineOutput]:
        logger.exception(
            "step %d with %d tokens failed, of requests %s",
            *(self.num_steps, output.num_tokens, self._scheduler.log_ids(output.scheduled)),
        )
        if len({entry.seq.request_id for entry in output.scheduled}) > 1:
            return self._scheduler.try_alone(output)
        return self._scheduler.fail_batch(output)

    def _room_beside(self, output: SchedulerOutput, parts: _Parts) -> int:
        """Tokens that a drafter may compute beside a step: as many as prompts could have had."""
        scheduler = self._scheduler
        budget = scheduler.max_num_batched_tokens
        paced = scheduler.pace.prompt_tokens(len(parts.decodes), budget) - parts.num_prompt_tokens
        return max(0, min(paced, budget - output.num_tokens))

    def _learn(self, step: _InFlight, sampled: Sampled, step_s: float) -> None:
        """Learn what the step cost, for the sizes of the next ones."""
        parts = step.parts
        decodes, num_prompt_tokens = parts.decodes, parts.num_prompt_tokens
        if step.is_usual and parts.num_verified == 0:
            pace = self._scheduler.pace
            pace.observe(len(decodes), num_prompt_tokens, step_s, parts.num_long_tokens)
            if num_prompt_tokens or self.num_steps % DECODES_LEARNT == 0:
                self._learnt.observe(StepWork.of(step.output.scheduled), step_s)
        else:
            self._scheduler.pace.overlook(len(decodes))
        if self._guesser is not None:
            tells = step.is_usual and num_prompt_tokens == 0
            self._guesser.learn(decodes, sampled, step_s if tells else None)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts that a step's tokens are made of."""

    decodes: list[ScheduledSequence]
    num_verified: int
    num_prompt_tokens: int
    num_long_tokens: int

    @staticmethod
    def of(output: SchedulerOutput) -> _Parts:
        decodes = [entry for entry in output.scheduled if entry.decodes]
        num_verified = sum(len(entry.draft_token_ids) for entry in decodes)
        num_prompt_tokens = output.num_tokens - len(decodes) - num_verified
        num_long_tokens = output.num_long_tokens if num_prompt_tokens else 0
        return _Parts(decodes, num_verified, num_prompt_tokens, num_long_tokens)


def _without(keys: Collection[Key], found: Mapping[Key, T]) -> dict[Key, T]:
    return {key: each for key, each in found.items() if key not in keys}


def _part(output: SchedulerOutput, entries: list[ScheduledSequence]) -> SchedulerOutput:
    return msgspec.structs.replace(
        output, scheduled=entries, num_tokens=sum(entry.num_new_tokens for entry in entries)
    )
