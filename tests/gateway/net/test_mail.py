"""An e-mail is sent by a real SMTP server or said not to be, and no log has its link."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.tools.ports import free_port
from gateway.net.mail import Mailer, MailMessage, MailServer, invitation, password_link
from tests.gateway.net.smtp import REFUSED, Inbox, running_inbox

LINK = "https://gateway.example.com/invites/accept?token=" + "s3cret-" * 8
TO = "ada@example.com"


@pytest.fixture(scope="module")
def inbox() -> Iterator[Inbox]:
    with running_inbox() as inbox:
        yield inbox


def server_at(port: int, tls: str = "none") -> MailServer:
    return MailServer(
        host="127.0.0.1",
        port=port,
        tls=tls,  # type: ignore[arg-type]
        sender="Tollgate <gateway@example.com>",
        user="gateway",
        password="opens the door",
    )


@pytest.mark.parametrize("message", [invitation(TO, LINK, "owner"), password_link(TO, LINK)])
async def test_a_link_is_sent_to_one_person(inbox: Inbox, message: MailMessage) -> None:
    assert await Mailer(server_at(inbox.port)).send(message) == "sent"
    got = inbox.received[-1]
    assert inbox.recipients[-1] == [TO] == [got["to"]]
    assert got["from"] == "Tollgate <gateway@example.com>" and got["subject"] == message.subject
    assert got["message-id"].endswith("@example.com>") and got["date"]
    assert got["auto-submitted"] == "auto-generated"
    assert LINK in got.get_content().splitlines(), "a link is a line, whole"
    assert inbox.logins[-1] == (b"gateway", b"opens the door")


async def test_what_is_not_sent_is_said_and_logged_without_the_link(
    inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    before = len(inbox.received)
    message = invitation(TO, LINK, "owner")
    assert await Mailer(None).send(message) == "not_configured"
    assert not caplog.records
    assert await Mailer(server_at(free_port())).send(message) == "failed"
    assert await Mailer(server_at(inbox.port, "starttls")).send(message) == "failed"
    assert await Mailer(server_at(inbox.port, "implicit")).send(message) == "failed"
    assert await Mailer(server_at(inbox.port)).send(invitation(REFUSED, LINK, "owner")) == "failed"
    twice = invitation("ada@example.com\nBcc: eve@example.com", LINK, "owner")
    assert await Mailer(server_at(inbox.port)).send(twice) == "failed"
    assert len(inbox.received) == before
    assert sum("no e-mail was sent" in each.message for each in caplog.records) == 5
    # The server is of this process, too, and may log who writes to it.
    said = "\n".join(each.getMessage() for each in caplog.records if each.name != "mail.log")
    for secret in ("s3cret", TO, REFUSED, "eve", "opens the door"):
        assert secret not in said
