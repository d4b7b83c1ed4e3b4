"""Outputs of an engine on their way to who asked for them: at the moment they come, or a few steps
together.

A consumer that is slow costs bounded memory: what it has not taken yet is merged, at most one
pending output per choice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Literal

import msgspec

from engine.errors import EngineError
from engine.protocol import EngineOutput

FEW_STREAMS = 8
"""The outputs of a step with no more than these are never held: what they cost is little."""
MAX_COPIED_TOKENS = 64

Acceptance = Literal["left", "taken", "enough"]
Take = Callable[[EngineOutput], Acceptance]
"""Takes an output the moment it comes, which wakes no task. Left: not now, so its stream yields it.
Enough: taken, and the request wants no more: it is aborted."""


class OutputStreams(dict[str, "OutputStream"]):
    """The open streams of one client, by request.

    What an event costs the client and all behind it hardly depends on the tokens in it. So, while a
    step brings outputs for more than `few` streams, those that come within `interval_s` of the last
    ones that went on are held, and go on together when that time is over. The first output of a
    request waits for nothing, nor does one that ends a choice, nor any of a request that wants each
    `at_once`.
    """

    def __init__(
        self,
        interval_s: float,
        *,
        on_enough: Callable[[str], None],
        few: int = FEW_STREAMS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_enough`: hears which request wants no more. `clock`: seconds."""
        super().__init__()
        self._interval_s, self._few = interval_s, few
        self._on_enough, self._clock = on_enough, clock
        self._due_s = 0.0
        """When outputs go on again."""
        self._held: dict[str, OutputStream] = {}
        self._timer: asyncio.TimerHandle | None = None

    def open(
        self, request_id: str, take: Take | None = None, *, at_once: bool = False
    ) -> OutputStream:
        stream = self[request_id] = OutputStream(take, at_once=at_once)
        return stream

    def close(self, request_id: str) -> None:
        """Drop what comes for a request from now on. Unknown ids are ignored."""
        self.pop(request_id, None)
        self._held.pop(request_id, None)

    def push(self, outputs: Sequence[EngineOutput]) -> None:
        """Pass on the outputs of one step, now or a little later."""
        now_s = self._clock()
        is_due = now_s >= self._due_s or len(outputs) <= self._few
        for output in outputs:
            request_id = output.request_id
            stream = self.get(request_id)
            if stream is None:  # its consumer left before its abort took effect
                continue
            stream.add(output)
            if is_due or output.finish_reason is not None or not stream.may_hold:
                if stream.hand_on():
                    self._on_enough(request_id)
            else:
                self._held[request_id] = stream
        if is_due:
            self._release()
        elif self._held and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._due_s - now_s, self._release)

    def fail(self, error_of: Callable[[], EngineError]) -> None:
        """Let all open streams raise, each an error of its own."""
        for stream in self.values():
            stream.fail(error_of())

    def _release(self) -> None:
        """Let go on what is held."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due_s = self._clock() + self._interval_s
        held, self._held = self._held, {}
        for request_id, stream in held.items():
            if stream.hand_on():
                self._on_enough(request_id)


class OutputStream:
    """Outputs on their way to one consumer, merged per choice while nobody takes them."""

    def __init__(self, take: Take | None = None, *, at_once: bool = False) -> None:
        """`take`, `at_once`: see `Engine.generate`."""
        self._take, self._at_once = take, at_once
        self._context = copy_context()
        self._pending: dict[int, EngineOutput] = {}
        """By choice, in the order of their newest part, so that usage stays monotone."""
        self._error: Exception | None = None
        self._awaited: asyncio.Future[None] | None = None
        """The consumer waits for what comes next: a future costs a third of an event's wait."""
        self.may_hold = False
        """Its outputs need not go on at once."""
        self.ended = False
        """The engine is done with the request: its last output or an error arrived."""
        self.finished = False
        """The last output was taken."""

    def push(self, output: EngineOutput) -> bool:
        """Hand an output on at once. Return whether the consumer wants no more."""
        self.add(output)
        return self.hand_on()

    def add(self, output: EngineOutput) -> None:
        if self._error is not None:
            return
        older = self._pending.pop(output.index, None)
        self._pending[output.index] = output if older is None else _merge(older, output)
        self.ended = self.ended or output.finished

    def hand_on(self) -> bool:
        """Give what is pending to whoever waits for it. Return whether it wants no more."""
        self.may_hold = not self._at_once
        take, awaited = self._take, self._awaited
        if awaited is None or awaited.done():
            return False  # who comes for it finds it
        try:
            while self._pending and take is not None:
                index = next(iter(self._pending))
                taken = self._context.run(take, self._pending[index])
                if taken == "left":
                    break
                del self._pending[index]
                if taken == "enough":
                    return True
        except Exception as error:  # the consumer's own: it hears of it where it waits
            self._pending.clear()
            self._error = error
        if self._pending or self._error is not None:
            awaited.set_result(None)
        return False

    def fail(self, error: EngineError) -> None:
        """Raised after what is pending; nothing to tell once the last output is here."""
        if not self.ended:
            self.ended = True
            self._error = error
            if self._awaited is not None and not self._awaited.done():
                self._awaited.set_result(None)

    async def next(self) -> EngineOutput:
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._awaited = asyncio.get_running_loop().create_future()
            try:
                await self._awaited
            finally:
                self._awaited = None
        output = self._pending.pop(next(iter(self._pending)))
        self.finished = output.finished
        return output


def _merge(older: EngineOutput, newer: EngineOutput) -> EngineOutput:
    """Two successive outputs of one choice as one. Consumes both: their lists grow in place, so
    that a choice nobody reads costs constant time per token."""
    logprobs = older.logprobs
    is_plain = logprobs is None and older.prompt_logprobs is None
    if is_plain and older.finish_reason is None and len(older.token_ids) <= MAX_COPIED_TOKENS:
        newer.token_ids[:0] = older.token_ids
        return newer
    older.token_ids.extend(newer.token_ids)
    if logprobs is not None and newer.logprobs is not None:
        logprobs.extend(newer.logprobs)
    return msgspec.structs.replace(
        newer,
        token_ids=older.token_ids,
        logprobs=newer.logprobs if logprobs is None else logprobs,
        prompt_logprobs=older.prompt_logprobs,
        finish_reason=older.finish_reason or newer.finish_reason,
        error_code=older.error_code or newer.error_code,
    )
