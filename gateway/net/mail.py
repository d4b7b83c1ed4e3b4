"""Sends an e-mail by the operator's SMTP server (RFC 5321, RFC 6409), to one person at a time.

A link in a message is a secret of whom it is for, and so is the address: neither is logged.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from typing import Literal

import msgspec

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Bounds one message from the connection to the server's word: somebody waits for the answer."""
MAX_AT_ONCE = 8

MailOutcome = Literal["sent", "failed", "not_configured"]
"""sent: the server took it. failed: it did not, in time; the log says why."""


class MailServer(msgspec.Struct, frozen=True, kw_only=True):
    """An SMTP server. `tls`: starttls (refused without), implicit, or none."""

    host: str
    port: int
    tls: Literal["starttls", "implicit", "none"]
    sender: str
    user: str | None = None
    password: str | None = None


class MailMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of plain text to one address."""

    to: str
    subject: str
    text: str


class Mailer:
    """`server` None: nothing is sent. `trust`: the certificates that are believed; None: the
    system's."""

    def __init__(self, server: MailServer | None, *, trust: ssl.SSLContext | None = None) -> None:
        self._server, self._trust = server, trust
        self._places = asyncio.Semaphore(MAX_AT_ONCE)

    async def send(self, message: MailMessage) -> MailOutcome:
        """Send a message once, and say what came of it. Never raises for what a server does."""
        server = self._server
        if server is None:
            return "not_configured"
        import aiosmtplib  # most gateways send none

        try:
            async with asyncio.timeout(TIMEOUT_S), self._places:
                await aiosmtplib.send(
                    to_email(message, server.sender),
                    hostname=server.host,
                    port=server.port,
                    username=server.user,
                    password=server.password,
                    use_tls=server.tls == "implicit",
                    start_tls=server.tls == "starttls",
                    tls_context=None if server.tls == "none" else self._trust,
                    timeout=TIMEOUT_S,
                )
        except (aiosmtplib.SMTPException, OSError, ValueError, TimeoutError) as error:
            code = getattr(error, "code", None)
            log.error(
                "no e-mail was sent by %s:%d: %s%s",
                *(server.host, server.port, type(error).__name__),
                "" if code is None else f" {code}",
            )
            return "failed"
        return "sent"


def to_email(message: MailMessage, sender: str) -> EmailMessage:
    """Return it with its headers. Raises: ValueError for one that would be two headers."""
    made = EmailMessage()
    made["From"], made["To"], made["Subject"] = sender, message.to, message.subject
    made["Date"] = formatdate(usegmt=True)
    made["Message-ID"] = make_msgid(domain=sender.rpartition("@")[2].rstrip(">"))
    made["Auto-Submitted"] = "auto-generated"  # no answering machine answers (RFC 3834)
    made.set_content(message.text)
    return made


def invitation(email: str, url: str, role: str) -> MailMessage:
    """Write the message that brings an invite's link."""
    return MailMessage(
        to=email,
        subject="An invitation to Tollgate",
        text=f"You are invited to an organization of this Tollgate, as {role}. This link is for you"
        f" alone; it works once, for a week:\n\n{url}\n\n"
        "If you expect no invitation, do nothing.\n",
    )


def password_link(email: str, url: str) -> MailMessage:
    """Write the message that brings the link by which somebody sets another password."""
    return MailMessage(
        to=email,
        subject="Set another password at Tollgate",
        text="An administrator of your organization made this link, with which you set another"
        f" password. It is for you alone, works once, and not for long:\n\n{url}\n\nIf you asked"
        " nobody for it, tell them; your password is as it was.\n",
    )
