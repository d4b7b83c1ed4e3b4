"""An SMTP server that keeps what it is sent, for the tests of e-mail."""

from __future__ import annotations

from collections.abc import Iterator
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
    """`received`: the messages; `logins`: who said to be whom."""

    def __init__(self) -> None:
        self.port = free_port()
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
        message = BytesParser(policy=default).parsebytes(envelope.content)
        self.received.append(cast(EmailMessage, message))
        self.recipients.append(envelope.rcpt_tos)
        return "250 OK"

    def authenticate(
        self, server: Any, session: Any, envelope: Any, mechanism: str, data: LoginPassword
    ) -> AuthResult:
        self.logins.append((data.login, data.password))
        return AuthResult(success=True)


@contextmanager
def running_inbox() -> Iterator[Inbox]:
    inbox = Inbox()
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
