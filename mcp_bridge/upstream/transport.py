"""The transport of messages to a server and back, whatever the server is behind it.

`http_transport` is the one of Streamable HTTP, whose words all transports speak: a request has a
method, headers and at most one message, an answer has a status, headers and messages. A transport
knows no era and no caller.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from mcp_bridge.protocol.rpc import Message


class TransportFailed(Exception):
    """There is no answer, and why, in one word. What was asked may or may not have been done."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotSent(TransportFailed):
    """The request did not go out, and it is nothing that the server did: no credential, say.

    `sign_in_url`: where a person can change that.
    """

    def __init__(self, reason: str, sign_in_url: str | None = None) -> None:
        super().__init__(reason)
        self.sign_in_url = sign_in_url


class CredentialRefused(TransportFailed):
    """The server did not take the credential that it was shown, and has done nothing. `challenge`:
    its `WWW-Authenticate`."""

    def __init__(self, status: int, challenge: str) -> None:
        super().__init__(f"status_{status}")
        self.status, self.challenge = status, challenge


class ReadCount(msgspec.Struct):
    """Counts how much was read for one owner, over however many answers."""

    bytes: int = 0
    messages: int = 0


class TransportAnswer(Protocol):
    """An answer whose head is there."""

    status: int
    kind: str
    """Its media type."""
    last_id: str | None
    """Of the event that came last; where to read on."""
    retry_ms: int

    @property
    def headers(self) -> Mapping[str, str]:
        """Names in lower case."""
        ...

    @property
    def is_stream(self) -> bool: ...

    async def body(self) -> bytes: ...

    def messages(self, spent: ReadCount | None = None) -> AsyncGenerator[Message | None]:
        """Yield the messages of the answer.

        `spent`: of what its owner may read altogether; None: it stands for itself.
        """
        ...


def ignore() -> None:
    """Do nothing."""


class TransportRequest(msgspec.Struct, frozen=True):
    """A request in the words of Streamable HTTP.

    `endless`: its answer is a stream that may say nothing for long. `on_change`: the server offers
    something else now. `on_sent`: from now on the server may have been asked.
    """

    method: str
    message: Message | None
    headers: Mapping[str, str]
    endless: bool = False
    on_change: Callable[[], None] = ignore
    on_sent: Callable[[], None] = ignore


class Transport(Protocol):
    def ask(self, request: TransportRequest) -> AbstractAsyncContextManager[TransportAnswer]:
        """Send a request and yield its answer. Raises: TransportFailed, httpcore's errors,
        Unreachable."""
        ...

    async def close(self) -> None: ...


class StreamTransport(Protocol):
    """A transport of whole messages, both ways."""

    @property
    def legacy_only(self) -> bool:
        """It is of a transport that the newer era does not have."""
        ...

    @property
    def left(self) -> bool:
        """It ended because nothing was on its way for long."""
        ...

    async def send(self, message: Message) -> None:
        """Raises: TransportFailed."""
        ...

    def messages(self) -> AsyncIterator[Message]:
        """Yield messages until the server has ended it. Raises: TransportFailed."""
        ...
