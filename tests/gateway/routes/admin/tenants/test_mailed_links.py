"""Invites and password links are sent to whom they are for, and the answer says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.net.mail import Mailer, MailServer
from tests.gateway.net.smtp import REFUSED, Inbox, running_inbox
from tests.gateway.routes.admin.conftest import World


@pytest.fixture
def inbox(world: World) -> Iterator[Inbox]:
    with running_inbox() as inbox:
        before = world.services.mailer
        server = MailServer(host="127.0.0.1", port=inbox.port, tls="none", sender="g@example.com")
        world.services.mailer = Mailer(server)
        yield inbox
        world.services.mailer = before


async def test_an_invite_is_sent_once(world: World, inbox: Inbox) -> None:
    wanted = {"email": "new.one@example.com", "role": "developer"}
    for _ in range(2):
        headers = {"idempotency_key": "invite-new-one"}
        made = await world.call("POST", "/v1/admin/invites", wanted, **headers)
        assert made.status_code == 201 and made.json()["mail"] == "sent"
    [got] = inbox.received
    assert got["to"] == wanted["email"]
    assert made.json()["url"] in got.get_content()


async def test_an_invite_of_openai_is_sent(world: World, inbox: Inbox) -> None:
    wanted = {"email": "new.two@example.com", "role": "reader"}
    made = await world.call("POST", "/v1/organization/invites", wanted)
    assert made.headers["x-tollgate-invite-mail"] == "sent"
    assert made.headers["x-tollgate-invite-link"] in inbox.received[-1].get_content()


async def test_the_first_owner_of_an_organization_is_invited(world: World, inbox: Inbox) -> None:
    wanted = {"name": "mailed", "owner_email": "owner@example.com"}
    made = (await world.call("POST", "/v1/admin/orgs", wanted)).json()
    assert made["owner_invite"]["mail"] == "sent"
    assert made["owner_invite"]["url"] in inbox.received[-1].get_content()


async def test_a_link_that_is_not_sent_stands_in_the_answer(world: World, inbox: Inbox) -> None:
    wanted = {"email": REFUSED, "role": "reader"}
    made = (await world.call("POST", "/v1/admin/invites", wanted)).json()
    assert made["mail"] == "failed" and made["url"] and not inbox.received


async def test_without_a_server_nothing_is_sent(world: World) -> None:
    wanted = {"email": "new.three@example.com", "role": "reader"}
    made = (await world.call("POST", "/v1/admin/invites", wanted)).json()
    assert made["mail"] == "not_configured" and made["url"]
