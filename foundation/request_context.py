"""Tells which request a task works for: its id, the trace that it is a part of, and its stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import Context, ContextVar, copy_context

from foundation.stages import Stage, Stages, new_span_id
from foundation.trace_context import (
    NO_CLIENT_TRACE,
    TRACE_HEADERS,
    ClientTrace,
    TracePolicy,
    read_trace,
    traceparent,
)

MAX_NAMED_BYTES = 1024


class LogContext:
    """Names the request that a task works for. `request`: its id, `req_` and 32 hex digits, of
    which a trace is made where none is continued. `headers`: what the client sent; they are looked
    through once somebody asks for the trace, not before. `policy`: which traces are recorded and
    passed on; None: none. `made_by`: the span of an earlier request that made this work, which has
    a trace of its own. `stages`: those of the request.
    """

    __slots__ = (
        *("_client", "_headers", "_is_sampled", "_own_trace", "_span_id"),
        *("made_by", "policy", "request", "stages"),
    )

    def __init__(
        self,
        request: str,
        headers: Iterable[tuple[bytes, bytes]] = (),
        policy: TracePolicy | None = None,
        *,
        made_by: ClientTrace = NO_CLIENT_TRACE,
        own_trace: str = "",
    ) -> None:
        """`own_trace`: the trace's id, where the request's would not be its own."""
        self.request, self.policy, self.stages = request, policy, Stages()
        self.made_by, self._own_trace = made_by, own_trace
        self._headers = headers
        self._client: ClientTrace | None = None
        self._is_sampled: bool | None = None
        self._span_id = 0

    @property
    def client(self) -> ClientTrace:
        """The trace that the client named."""
        headers = self._headers  # before the look at `_client`: a thread asks, too
        if self._client is None:
            self._client = read_trace(headers)
            self._headers = ()
        return self._client

    def note_client(self, named: Mapping[str, object]) -> None:
        if not self.client.trace and self._is_sampled is None:
            self._client = read_trace(
                (name.encode(), str(value).encode(errors="replace")[:MAX_NAMED_BYTES])
                for name, value in named.items()
                if name in TRACE_HEADERS
            )

    @property
    def parent(self) -> ClientTrace:
        """The trace that is continued: the client's where it is trusted, or where nothing is
        recorded."""
        policy = self.policy
        return self.client if policy is None or policy.trusts_clients else NO_CLIENT_TRACE

    @property
    def link(self) -> ClientTrace:
        """The trace that is not continued, but named: that of the request which made this work, or
        the client's where it is not trusted."""
        if self.made_by.trace or self.parent.trace:
            return self.made_by
        return self.client

    @property
    def trace(self) -> str:
        """The trace id, 32 hex digits."""
        return self.parent.trace or self._own_trace or self.request[-32:]

    @property
    def client_trace(self) -> str:
        """The id of the trace that the client named, where it is not continued."""
        return "" if self.parent.trace else self.client.trace

    @property
    def span_id(self) -> int:
        """The id of the span that stands for all of it."""
        if not self._span_id:
            self._span_id = new_span_id()
        return self._span_id

    @property
    def is_sampled(self) -> bool:
        """Whether the trace is recorded, as far as that can be said before the request has ended;
        decided once."""
        if self._is_sampled is None:
            policy = self.policy
            self._is_sampled = policy is not None and policy.samples(self.request, self.client)
        return self._is_sampled

    def for_later(self, trace: str) -> LogContext:
        """Return the context of what goes on for the request after its answer, in a trace of its
        own that is recorded if this one is."""
        maker = made_by(self.traceparent) if self.policy is not None else NO_CLIENT_TRACE
        later = LogContext(self.request, (), self.policy, made_by=maker, own_trace=trace)
        later._is_sampled = self.is_sampled
        return later

    @property
    def traceparent(self) -> str:
        """The header that names the span which stands for all of it."""
        return traceparent(self.trace, self.span_id, is_sampled=self.is_sampled)


LOG_CONTEXT: ContextVar[LogContext | None] = ContextVar("log_context", default=None)
"""A task inherits it from the one that makes it."""


def outside_requests() -> Context:
    """Return a context for a task that outlives the request which happens to start it."""
    context = copy_context()
    context.run(LOG_CONTEXT.set, None)
    return context


def current_stages() -> Stages:
    """Return the stages of the request that this task works for; new ones if it does for none."""
    context = LOG_CONTEXT.get()
    return Stages() if context is None else context.stages


def current_traceparent() -> str | None:
    """Return what names the request of this task in a trace; None: nothing is recorded."""
    context = LOG_CONTEXT.get()
    return None if context is None or context.policy is None else context.traceparent


def made_by(named: str | None) -> ClientTrace:
    """Read what `current_traceparent` returned for an earlier request."""
    return read_trace([(b"traceparent", named.encode())]) if named else NO_CLIENT_TRACE


def outgoing_trace(stage: Stage | None, destination: str) -> dict[str, str]:
    """Return `traceparent` and `tracestate` for what a stage of this task's request sends; nothing
    where the destination is not to know them. `destination`: as `TracePolicy` has it."""
    context = LOG_CONTEXT.get()
    if stage is None or context is None:
        return {}
    policy = context.policy
    if policy is None or not policy.sends_to(destination):
        return {}
    if not stage.span_id:
        stage.span_id = new_span_id()
    parent = traceparent(context.trace, stage.span_id, is_sampled=context.is_sampled)
    state = context.parent.state
    return {"traceparent": parent, "tracestate": state} if state else {"traceparent": parent}


def note_client_trace(named: Mapping[str, object]) -> None:
    """Take the trace that a message of this task's request names (`_meta` of MCP, SEP-414), unless
    the request's headers name one."""
    context = LOG_CONTEXT.get()
    if context is not None and isinstance(named.get("traceparent"), str):
        context.note_client(named)
