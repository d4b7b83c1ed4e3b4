"""The page on which people choose their e-mail: by its link, by a mail program's button, or signed
in; and nobody chooses for somebody else."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
import sqlalchemy as sa
from litestar import Litestar
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.tables import entries
from gateway.db import tenant
from gateway.tenancy.member_tables import users
from gateway.tenancy.members.users import archive_user
from tests.gateway.auth.browsing import hidden, new_browser
from tests.gateway.auth.conftest import ACTOR, Tenant, make_user

PAGE = "/account/mail"
CHECKED = re.compile(r'<input type="checkbox" name="(\w+)" value="on" checked>')
BUTTON = {"List-Unsubscribe": "One-Click"}


def link(app: Litestar, whose: Tenant, topic: str | None = None) -> str:
    """Return the path and query of the link in an e-mail."""
    url = app.state.services.webhooks.choice_links.url(whose.org_id, whose.user_id, topic)
    return urlsplit(url)._replace(scheme="", netloc="").geturl()


async def choices(db: AsyncEngine, whose: Tenant) -> dict[str, bool]:
    query = sa.select(users.c.mail_choices).where(users.c.id == whose.user_id)
    async with db.connect() as conn:
        found: dict[str, bool] = await conn.scalar(query)
    return found


async def test_a_link_is_enough_to_choose(
    app: Litestar, db: AsyncEngine, browser: httpx.AsyncClient, ada: Tenant
) -> None:
    shown = await browser.get(link(app, ada))
    assert shown.status_code == 200 and ada.email in shown.text
    assert {*CHECKED.findall(shown.text)} == {"budgets", "credits", "invoices", "approvals"}
    assert "payments" not in shown.text, "they are the operator's to take"
    assert shown.headers["referrer-policy"] == "no-referrer"
    wanted = {**hidden(shown.text), "budgets": "on", "rate_limits": "on", "payments": "on"}
    saved = await browser.post(PAGE, data=wanted)
    assert saved.status_code == 200 and "Saved." in saved.text
    assert {*CHECKED.findall(saved.text)} == {"budgets", "rate_limits"}
    found = await choices(db, ada)
    assert {topic for topic, sent in found.items() if sent} == {"budgets", "rate_limits"}
    assert "payments" not in found
    query = sa.select(entries).where(entries.c.target == ada.user_id)
    async with db.connect() as conn:
        (written,) = await conn.execute(query)
    assert (written.action, written.actor_id) == ("user.updated", ada.user_id)


async def test_a_mail_programs_button_switches_its_topic_off(
    app: Litestar, db: AsyncEngine, browser: httpx.AsyncClient, ada: Tenant
) -> None:
    done = await browser.post(link(app, ada, "credits"), data=BUTTON)
    assert done.status_code == 200
    assert await choices(db, ada) == {"credits": False}
    parts = {"List-Unsubscribe": (None, "One-Click")}
    assert (await browser.post(link(app, ada, "invoices"), files=parts)).status_code == 200
    assert (await choices(db, ada)).pop("invoices") is False
    assert (await browser.post(link(app, ada, "nonsense"), data=BUTTON)).status_code == 200
    assert await choices(db, ada) == {"credits": False, "invoices": False}


async def test_who_is_signed_in_needs_no_link(
    db: AsyncEngine, signed_in: httpx.AsyncClient, ada: Tenant
) -> None:
    assert PAGE in (await signed_in.get("/oauth/account")).text
    shown = await signed_in.get(PAGE)
    await signed_in.post(PAGE, data={**hidden(shown.text), "invoices": "on"})
    assert (await choices(db, ada))["budgets"] is False


async def test_who_is_not_signed_in_and_has_no_link_signs_in(browser: httpx.AsyncClient) -> None:
    asked = await browser.get(PAGE)
    assert (asked.status_code, asked.headers["location"]) == (303, "/oauth/login")


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"budgets": "on"}, 403),
        ({"budgets": "on", "form_token": "made up"}, 403),
        (BUTTON, 403),
        ({**BUTTON, "token": "made up"}, 403),
    ],
)
async def test_another_sites_form_changes_nothing(
    db: AsyncEngine, signed_in: httpx.AsyncClient, ada: Tenant, form: dict[str, str], status: int
) -> None:
    """A session goes along with it; the form's own token does not."""
    assert (await signed_in.post(PAGE + "?topic=budgets", data=form)).status_code == status
    assert await choices(db, ada) == {}


async def test_a_link_that_is_none_or_of_somebody_who_left_is_closed(
    app: Litestar, db: AsyncEngine, browser: httpx.AsyncClient, ada: Tenant
) -> None:
    left = await make_user(db, ada.org_id, "left@x.example", role="admin")
    gone = msgspec.structs.replace(ada, user_id=left)
    async with tenant(db, ada.org_id) as conn:
        await archive_user(conn, org_id=ada.org_id, user_id=left, actor=ACTOR)
    for path in (link(app, gone), f"{PAGE}?token=made-up", f"{PAGE}?token={'x' * 4000}"):
        assert (await browser.get(path)).status_code == 404
    assert (await browser.post(f"{PAGE}?token=a.b&topic=budgets", data=BUTTON)).status_code == 404
    async with new_browser(app) as fresh:
        assert (await fresh.get(link(app, ada))).status_code == 200
