"""The interface of transports, which carry messages to a server and back.

All imitate Streamable HTTP (`transports.streamable_http`): a request has a method, headers and at
most one message, an answer has a status, headers and messages. A transport knows no era and no
caller.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from mcp_bridge.protocol.rpc import Message


class TransportFailed(Exception):
    """There is no answer; `reason` is one word. The request may or may not have been executed."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotSent(TransportFailed):
    """The request did not go out, for a reason on our side, such as a missing credential.

    `sign_in_url`: the page where a person can sign in at the server.
    """

    def __init__(self, reason: str, sign_in_url: str | None = None) -> None:
        super().__init__(reason)
        self.sign_in_url = sign_in_url


class CredentialRefused(TransportFailed):
    """The server refused the credential and has done nothing. `challenge`: its
    `WWW-Authenticate`."""

    def __init__(self, status: int, challenge: str) -> None:
        super().__init__(f"status_{status}")
        self.status, self.challenge = status, challenge


class ReadCount(msgspec.Struct):
    """Counts what was read for one request, over all its answers."""

    bytes: int = 0
    messages: int = 0


class TransportAnswer(Protocol):
    """An answer whose status and headers are known."""

    status: int
    kind: str
    """Its media type."""
    last_id: str | None
    """The id of the last event, from which the stream can be resumed."""
    retry_ms: int
    message_bytes: int | None
    """Bytes of the message that was yielded last; None: they were not counted."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Names in lower case."""
        ...

    @property
    def is_stream(self) -> bool: ...

    async def body(self) -> bytes: ...

    def messages(self, spent: ReadCount | None = None) -> AsyncGenerator[Message | None]:
        """Yield the messages of the answer. `spent`: the count of the whole request, for bounds."""
        ...


def ignore() -> None:
    """Do nothing."""


class TransportRequest(msgspec.Struct, frozen=True):
    """A request as Streamable HTTP has it.

    `endless`: its answer is a stream that may be silent for long. `on_change`: called when the
    server says that its offer changed. `on_sent`: called when the server may have got the request.
    """

    method: str
    message: Message | None
    headers: Mapping[str, str]
    endless: bool = False
    on_change: Callable[[], None] = ignore
    on_sent: Callable[[], None] = ignore


class Transport(Protocol):
    def ask(self, request: TransportRequest) -> AbstractAsyncContextManager[TransportAnswer]:
        """Send a request and yield its answer. Raises: TransportFailed, HttpClientError,
        Unreachable."""
        ...

    async def close(self) -> None: ...


class StreamTransport(Protocol):
    """A bidirectional stream of messages."""

    @property
    def legacy_only(self) -> bool:
        """True if the newer era does not have this transport."""
        ...

    @property
    def left(self) -> bool:
        """True if the stream ended because it was idle for long."""
        ...

    async def send(self, message: Message) -> None:
        """Raises: TransportFailed."""
        ...

    def messages(self) -> AsyncIterator[Message]:
        """Yield messages until the stream ends. Raises: TransportFailed."""
        ...
