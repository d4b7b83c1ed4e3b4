"""Reads and writes the context of a trace (W3C Trace Context), and decides what is recorded.

A client may name the trace that its request belongs to, and whether that is recorded. Who does not
trust its clients begins a trace of its own, which names theirs by a link: else whoever guesses or
overhears an id writes into somebody else's trace. That it is recorded is believed only so many
times a second, so that no client decides what tracing costs. `baggage` is never read.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

TRACEPARENT = re.compile(
    rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.{0,256})?"
)
"""Version, trace id, parent id and flags; a later version may add a part (Trace Context, 3.2)."""
TRACE_HEADERS = ("traceparent", "tracestate")
NO_TRACE, NO_PARENT, NO_VERSION = b"0" * 32, b"0" * 16, b"ff"
SAMPLED = 1
TRACESTATE = re.compile(rb"[\x20-\x7e]{1,512}")
"""The form in which it is passed on: 512 characters (3.3.1.5) that can stand in a header."""
RANDOM_DIGITS = 14
"""The last hex digits of a trace id, which are random (level 2, 2.2.2): as a request's id's are."""


class ClientTrace(NamedTuple):
    """The trace that a client names; all empty where it names none."""

    trace: str = ""
    """32 hex digits."""
    parent: str = ""
    """The id of the client's span, 16 hex digits."""
    is_sampled: bool = False
    """Whether the client records it."""
    state: str = ""
    """Its `tracestate`, as it came."""


NO_CLIENT_TRACE = ClientTrace()


def read_trace(headers: Iterable[tuple[bytes, bytes]]) -> ClientTrace:
    """Read the trace that a request's headers name. One that is named twice is none (3.2)."""
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value)
    if len(parents) != 1:
        return NO_CLIENT_TRACE
    found = TRACEPARENT.fullmatch(parents[0])
    if found is None or found[1] == NO_VERSION:
        return NO_CLIENT_TRACE
    if found[2] == NO_TRACE or found[3] == NO_PARENT:
        return NO_CLIENT_TRACE
    state = b",".join(states)  # several are one list (3.3)
    if TRACESTATE.fullmatch(state) is None:
        state = b""
    is_sampled = bool(int(found[4], 16) & SAMPLED)
    return ClientTrace(found[2].decode(), found[3].decode(), is_sampled, state.decode())


def traceparent(trace: str, span_id: int, *, is_sampled: bool) -> str:
    """Write the header (3.2). `trace`: 32 hex digits."""
    return f"00-{trace}-{span_id:016x}-{'01' if is_sampled else '00'}"


class TokenBucket:
    """Lets `per_s` things pass in a second, and as many at once; of all threads."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._most, self._clock = per_s, max(1.0, per_s), clock
        self._left, self._at = self._most if per_s else 0.0, clock()
        self._lock = threading.Lock()

    def take(self) -> bool:
        with self._lock:
            now = self._clock()
            passed, self._at = max(0.0, now - self._at), now
            self._left = min(self._most, self._left + passed * self._per_s)
            if self._left < 1:
                return False
            self._left -= 1
            return True


class TracePolicy:
    """Decides which requests of a process are recorded from their begin, and who is told of their
    traces.

    `ratio`: of the requests whose clients name no trace. A trace that a client records is recorded
    here, too, as long as `client_sampled_per_s` of them are not reached, and by `ratio` beyond
    that. `trusts_clients`: a request continues the trace that its client names, and is not recorded
    where that is not; else that trace is linked to, and the request is sampled as all others are.
    `send_to`: destinations that get the context of a
    trace: a model, `mcp/` and the name of a server; `*` and `mcp/*` are all of them.
    """

    def __init__(
        self,
        *,
        ratio: float,
        client_sampled_per_s: float = 0.0,
        trusts_clients: bool = False,
        send_to: Collection[str] = (),
    ) -> None:
        self.trusts_clients = trusts_clients
        self._below: int = round(ratio * 16**RANDOM_DIGITS)
        self._of_clients = TokenBucket(client_sampled_per_s)
        self._send_to = frozenset(send_to)

    def samples(self, request: str, client: ClientTrace) -> bool:
        """Decide about a request, once. `request`: its id, which no client chooses."""
        if client.is_sampled:
            if self._of_clients.take():
                return True
        elif client.trace and self.trusts_clients:
            return False
        return int(request[-RANDOM_DIGITS:], 16) < self._below

    def sends_to(self, destination: str) -> bool:
        if not self._send_to:
            return False
        every = "mcp/*" if destination.startswith("mcp/") else "*"
        return destination in self._send_to or every in self._send_to
