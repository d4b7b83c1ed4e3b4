"""Answers a server that wants a model to write: by the caller's model, by ours, or by nobody's.

The model is handed in (`Sampler`), with whoever pays for it. Asked for together with something that
only a person can answer, what it wrote waits in the state that the client brings back. A sampled
model calls no tools but those that the server makes itself, so no call leads to another one.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from mcp_bridge.caller import Caller
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, METHOD_NOT_FOUND, Message, RpcError
from mcp_bridge.routing.exchanges import Answers, Event, Exchange, QuestionEvent
from mcp_bridge.upstream.upstream import Upstream, as_object

SAMPLING = "sampling/createMessage"
WINDOW_S = 60.0
"""In each such window a server may sample outside of requests as often as during one."""


class SampledState(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The state that we send in the place of a server's own `requestState`.

    `sampled`: results by key; `count`: of the whole call.
    """

    state: str | None
    sampled: dict[str, dict[str, Any]]
    count: int


class SampleCount:
    """Counts how often a server has had a model write.

    `window_s`: it begins anew after so long; None: never.
    """

    def __init__(self, upstream: Upstream, count: int = 0, window_s: float | None = None) -> None:
        self._server, self._most = upstream.name, upstream.config.max_samples
        self._window_s, self._began_at = window_s, time.monotonic()
        self.count = count

    def take(self) -> None:
        """Raises: RpcError."""
        if self._window_s is not None and time.monotonic() - self._began_at > self._window_s:
            self._began_at, self.count = time.monotonic(), 0
        if self.count >= self._most:
            data = {"server": self._server, "reason": "too_many_samples", "limit": self._most}
            raise RpcError(INTERNAL_ERROR, "The server asked for a model too often", data)
        self.count += 1


async def sampled(
    upstream: Upstream, caller: Caller, request: Message, taken: SampleCount
) -> dict[str, Any]:
    """Return the result of one `sampling/createMessage`. Raises: RpcError."""
    if upstream.config.sampling != "engine" or upstream.sampler is None:
        raise RpcError(METHOD_NOT_FOUND, "Sampling is off for this server", SAMPLING)
    taken.take()
    params = as_object(request.get("params"))
    return await upstream.sampler.sample(caller, upstream.name, params)


class SampledExchange:
    """An exchange whose server's wish for a model is granted here; all else goes to the client."""

    def __init__(
        self, inner: Exchange, upstream: Upstream, caller: Caller, before: SampledState | None
    ) -> None:
        self._inner, self._upstream, self._caller = inner, upstream, caller
        self._count = SampleCount(upstream, 0 if before is None else before.count)
        self._kept: Answers = {}
        self._refused: RpcError | None = None
        self.holds = inner.holds

    @property
    def is_out(self) -> bool:
        return self._inner.is_out

    def carry(self, trace: Mapping[str, str]) -> None:
        self._inner.carry(trace)

    async def events(self) -> AsyncGenerator[Event]:
        try:
            async with aclosing(self._all()) as events:
                async for event in events:
                    yield event
        except RpcError as error:
            # A server that fails with our refusal: whose it is, its code alone would not say.
            if self._refused is not None and error.message == self._refused.message:
                raise self._refused from None
            raise

    async def _all(self) -> AsyncGenerator[Event]:
        async with aclosing(self._inner.events()) as events:
            async for event in events:
                if not isinstance(event, QuestionEvent):
                    yield event
                    continue
                ours = {key for key, each in event.requests.items() if is_sampling(each)}
                answers = {key: await self._answer(event.requests[key]) for key in sorted(ours)}
                rest = {key: each for key, each in event.requests.items() if key not in ours}
                if answers and (self.holds or not rest):
                    await self._inner.answer(answers)
                    answers = {}
                if rest or not event.requests:  # none: the client comes again
                    self._kept = answers
                    yield QuestionEvent(rest, None if self.holds else self._carried(event.state))

    async def _answer(self, request: Message) -> Message:
        """Return the model's answer. A server of the older era is told of a refusal; the newer era
        has no such message, so the call fails. Raises: RpcError."""
        try:
            return {"result": await sampled(self._upstream, self._caller, request, self._count)}
        except RpcError as error:
            if not self.holds:
                raise
            self._refused = error
            return {"error": error.to_error()}

    def _carried(self, state: str | None) -> str:
        results = {key: as_object(each.get("result")) for key, each in self._kept.items()}
        return msgspec.json.encode(SampledState(state, results, self._count.count)).decode()

    async def answer(self, answers: Answers) -> None:
        kept, self._kept = self._kept, {}
        await self._inner.answer({**answers, **kept})

    async def cancel(self, reason: str) -> None:
        await self._inner.cancel(reason)


def is_sampling(request: Message) -> bool:
    return request.get("method") == SAMPLING


def taken_up(params: dict[str, Any]) -> tuple[dict[str, Any], SampledState | None]:
    """Return the parameters with the server's own state and all answers, and our state."""
    try:
        before = msgspec.json.decode(str(params.get("requestState")), type=SampledState)
    except msgspec.DecodeError:
        return params, None  # given before the model was ours to ask: it is the server's own
    kept = {name: value for name, value in params.items() if name != "requestState"}
    if before.state is not None:
        kept["requestState"] = before.state
    kept["inputResponses"] = {**as_object(params.get("inputResponses")), **before.sampled}
    return kept, before
