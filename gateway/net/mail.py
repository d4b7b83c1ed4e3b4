"""Sends an e-mail by the operator's SMTP server (RFC 5321, RFC 6409), to one person at a time.

A link in a message is a secret of whom it is for, and so is the address: neither is logged.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Mapping
from contextlib import suppress
from email.errors import MessageError
from email.headerregistry import Address, BaseHeader, HeaderRegistry, UnstructuredHeader
from email.message import EmailMessage
from email.policy import EmailPolicy, Policy
from email.utils import formatdate, make_msgid
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from aiosmtplib import SMTP

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""Bounds one message from the connection to the server's word: somebody waits for the answer."""
FAREWELL_S = 1.0
MAX_AT_ONCE = 8
SPECIALS = frozenset('()<>[]:;@\\,"')
"""Characters that end or begin something in a header with addresses (RFC 5322, 3.2.3)."""
PERMANENT = range(500, 600)
"""Reply codes of a refusal for good (RFC 5321, 4.2.1)."""

MailOutcome = Literal["sent", "failed", "not_configured"]
"""sent: the server took it. failed: it did not, in time; the log says why."""


class WholeHeader(UnstructuredHeader, BaseHeader):
    """A header of one URL. Python would break a long one into encoded words, which no reader of
    such a header puts together again; a line may have 998 characters (RFC 5322, 2.1.1)."""

    def fold(self, *, policy: Policy) -> str:
        return f"{self.name}: {self}{policy.linesep}"


HEADERS = HeaderRegistry()
HEADERS.map_to_type("list-unsubscribe", WholeHeader)


class MailError(Exception):
    """An error: the server did not take a message. `code`: its reply, if there was one. `final`:
    it will never take this one to this person. Its text holds no address and nothing secret."""

    def __init__(self, text: str, *, code: int | None = None, final: bool = False) -> None:
        super().__init__(text)
        self.code, self.final = code, final


class MailServer(msgspec.Struct, frozen=True, kw_only=True):
    """An SMTP server. `tls`: starttls (refused without), implicit, or none."""

    host: str
    port: int
    tls: Literal["starttls", "implicit", "none"]
    sender: str
    user: str | None = None
    password: str | None = None


class MailMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of plain text to one address. `id`: the same at each attempt, so that who gets it
    twice is shown it once; None: a random one. `headers`: further ones."""

    to: str
    subject: str
    text: str
    id: str | None = None
    headers: Mapping[str, str] = {}


class Mailer:
    """`server` None: nothing is sent. `trust`: the certificates that are believed; None: the
    system's. `at_once`: messages that are on their way at a time."""

    def __init__(
        self,
        server: MailServer | None,
        *,
        trust: ssl.SSLContext | None = None,
        at_once: int = MAX_AT_ONCE,
    ) -> None:
        self._server, self._trust = server, trust
        self._places = asyncio.Semaphore(at_once)

    @property
    def is_configured(self) -> bool:
        return self._server is not None

    async def send(self, message: MailMessage) -> MailOutcome:
        """Send a message once, and say what came of it. Never raises for what a server does."""
        server = self._server
        if server is None:
            return "not_configured"
        try:
            await self.deliver(message)
        except MailError as error:
            code = "" if error.code is None else f" {error.code}"
            log.error("no e-mail was sent by %s:%d: %s%s", server.host, server.port, error, code)
            return "failed"
        return "sent"

    async def deliver(self, message: MailMessage) -> None:
        """Send a message once. Raises: MailError."""
        server = self._server
        if server is None:
            raise MailError("no server is configured")
        import aiosmtplib  # most gateways send none

        client = aiosmtplib.SMTP(
            hostname=server.host,
            port=server.port,
            username=server.user,
            password=server.password,
            use_tls=server.tls == "implicit",
            start_tls=server.tls == "starttls",
            tls_context=None if server.tls == "none" else self._trust,
            timeout=TIMEOUT_S,
        )
        try:
            async with asyncio.timeout(TIMEOUT_S), self._places:
                written = to_email(message, server.sender)
                await client.connect()
                await client.send_message(written, recipients=[message.to])
            await self._leave(client)
        except (ValueError, MessageError) as error:
            raise MailError(type(error).__name__, final=True) from None
        except (aiosmtplib.SMTPException, OSError, TimeoutError) as error:
            raise _explain(error) from None
        finally:
            client.close()

    async def _leave(self, client: SMTP) -> None:
        """Say goodbye; the message is the server's already."""
        import aiosmtplib

        with suppress(aiosmtplib.SMTPException, OSError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await client.quit()


def _explain(error: Exception) -> MailError:
    import aiosmtplib

    name = type(error).__name__
    if isinstance(error, aiosmtplib.SMTPRecipientsRefused):
        error = error.recipients[0]
    code = getattr(error, "code", None)
    # What is refused of the sender or the login is the operator's to put right.
    about_message = (aiosmtplib.SMTPRecipientRefused, aiosmtplib.SMTPDataError)
    return MailError(name, code=code, final=isinstance(error, about_message) and code in PERMANENT)


def to_email(message: MailMessage, sender: str) -> EmailMessage:
    """Return it with its headers. Raises: ValueError for one that would be two headers;
    ValueError or MessageError for an address that is none, or more than one."""
    made = EmailMessage(policy=EmailPolicy(header_factory=HEADERS))
    made["From"], made["Subject"] = sender, message.subject
    made["To"] = to_address(message.to)
    made["Date"] = formatdate(usegmt=True)
    domain = sender.rpartition("@")[2].rstrip(">")
    made["Message-ID"] = f"<{message.id}@{domain}>" if message.id else make_msgid(domain=domain)
    made["Auto-Submitted"] = "auto-generated"  # no answering machine answers (RFC 3834)
    for name, value in message.headers.items():
        made[name] = value
    made.set_content(message.text)
    return made


def to_address(text: str) -> Address:
    """Read one address. Raises: ValueError or MessageError for what is none, or more than one."""
    local, _, domain = text.rpartition("@")
    if not (local and domain):
        raise ValueError("an address that is none")
    if local.isascii():
        found = Address(addr_spec=text)
    elif SPECIALS.isdisjoint(local) and text.isprintable():
        found = Address(username=local, domain=domain)  # RFC 6531
    else:
        raise ValueError("an address that is none")
    if found.addr_spec != text:
        raise ValueError("an address with something else")
    return found


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
        subject="Set a new password at Tollgate",
        text="An administrator of your organization made this link, with which you set another"
        f" password. It is for you alone, works once, and not for long:\n\n{url}\n\nIf you asked"
        " nobody for it, tell them; your password is as it was.\n",
    )
