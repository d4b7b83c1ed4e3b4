"""Holds one request to an upstream on its way: whatever it waits for, it can be cut off.

Knows no queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from billing.events import Tier
from foundation.http1 import Connection
from gateway.fleet.replica import PreparedRequest
from gateway.fleet.upstream.bounds import InputBound
from gateway.fleet.upstream.meter import UpstreamMeter
from gateway.fleet.upstream.text import UpstreamText
from gateway.generate_request import GenerateRequest
from gateway.generation_events import RawBody, RawChunk, RawRun, TextDelta

Clock = Callable[[], float]
Items = tuple[RawChunk | RawRun | RawBody, ...]


def is_embedding(request: GenerateRequest) -> bool:
    return request.plain is not None and request.plain.path == "embeddings"


def repeats_prompt(request: GenerateRequest) -> bool:
    """Tell whether the answer begins with the prompt (`echo`)."""
    return request.forward is not None and bool(request.forward.get("echo"))


class UpstreamAborted(Exception):
    """Says that nobody waits for this attempt any more."""


class UpstreamAttempt:
    """A request on its way; `abort` breaks whatever it waits for."""

    def __init__(
        self,
        attempt_id: str,
        prepared: PreparedRequest,
        clock: Clock,
        tier: Tier | None,
        *,
        most_input: InputBound,
        most_output_tokens: int,
    ) -> None:
        """`most_input`, `most_output_tokens`: what may be billed of it."""
        self.id = attempt_id
        self.prepared = prepared
        self.most_output_tokens = most_output_tokens
        request = prepared.request
        self.meter = UpstreamMeter(
            model=request.model,
            n=request.n,
            input_tokens=prepared.input_tokens,
            most_input=most_input,
            most_output_tokens=most_output_tokens,
            repeated_tokens=len(prepared.payload) if repeats_prompt(request) else 0,
            service_tier=tier,
            embeds=is_embedding(request),
            is_plain=request.plain is not None,
        )
        prompt = request.prompt
        self._text = None if prompt is None else UpstreamText(prompt.stop)
        self.connection: Connection | None = None
        self.sent = False
        """Whether the upstream had the whole request before an abort, and may have begun."""
        self._clock = clock
        self._begun_at = clock()
        self._aborted = False
        self._wait: asyncio.Timeout | None = None

    def to_items(self, items: Items) -> Items | tuple[TextDelta, ...]:
        """Return what came, as it came, or for who did not ask in these words as text. Raises
        BrokenAnswer."""
        return items if self._text is None else self._text.read(items)

    def restart(self) -> None:
        """Count its time from now: what was before, it waited."""
        self._begun_at = self._clock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._begun_at

    @asynccontextmanager
    async def waiting(self, timeout_s: float) -> AsyncIterator[None]:
        """Bound an await. Raises TimeoutError, or UpstreamAborted when `abort` was called before or
        meanwhile."""
        if self._aborted:
            raise UpstreamAborted
        try:
            async with asyncio.timeout(timeout_s) as self._wait:
                yield
        except TimeoutError as error:
            if self._aborted:
                raise UpstreamAborted from error
            raise
        finally:
            self._wait = None

    def begin(self, connection: Connection) -> None:
        """Raises Aborted, and nothing is asked."""
        self.connection = connection
        if self._aborted:
            raise UpstreamAborted

    def abort(self) -> None:
        if self._aborted:
            return
        self._aborted = True
        self.sent = self.connection is not None and self.connection.sent
        if self.connection is not None:
            self.connection.interrupt(UpstreamAborted())
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(asyncio.get_running_loop().time())
