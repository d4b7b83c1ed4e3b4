"""An SMTP server that keeps what it is sent, for the tests of e-mail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from email.parser import BytesParser
from email.policy import default
from typing import Any, cast

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, LoginPassword

from bench.tools.ports import free_port

REFUSED = "nobody@example.com"


class Inbox:
    """`received`: the messages; `logins`: who said to be whom. `replies`: what it says to the next
    messages, before it takes all; `accepts_logins` False: it refuses them; `before_reply` is
    awaited in the server's own thread once it has a message."""

    def __init__(self, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.replies: list[str] = []
        self.accepts_logins = True
        self.before_reply: Callable[[], Awaitable[None]] | None = None
        self.received: list[EmailMessage] = []
        self.recipients: list[list[str]] = []
        self.logins: list[tuple[bytes, bytes]] = []

    async def handle_RCPT(
        self, server: Any, session: Any, envelope: Any, address: str, options: Any
    ) -> str:
        if address == REFUSED:
            return "550 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        if self.replies and not (reply := self.replies.pop(0)).startswith("250"):
            return reply
        message = BytesParser(policy=default).parsebytes(envelope.content)
        self.received.append(cast(EmailMessage, message))
        self.recipients.append(envelope.rcpt_tos)
        if self.before_reply is not None:
            await self.before_reply()
        return "250 OK"

    def authenticate(
        self, server: Any, session: Any, envelope: Any, mechanism: str, data: LoginPassword
    ) -> AuthResult:
        self.logins.append((data.login, data.password))
        return AuthResult(success=self.accepts_logins, handled=False)


@contextmanager
def running_inbox(port: int | None = None) -> Iterator[Inbox]:
    """Run a server. `port`: None: a free one."""
    inbox = Inbox(port)
    controller = Controller(
        inbox,
        hostname="127.0.0.1",
        port=inbox.port,
        authenticator=inbox.authenticate,
        auth_require_tls=False,
    )
    controller.start()
    try:
        yield inbox
    finally:
        controller.stop()
