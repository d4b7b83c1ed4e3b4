"""Webhooks, the audit log, the fleet and the settings, as people go through them in a browser."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from gateway.audit.log import Actor, record
from gateway.db import tenant
from gateway.tenancy.tables import api_keys
from tests.gateway.console.conftest import Visit
from tests.gateway.console.seeds import HOSTILE
from tests.gateway.console.server import PASSWORD_OF_URL, ConsoleServer

Sessions = Callable[[str, str], dict[str, str]]


def says(tab: Any, role: str, text: str) -> None:
    tab.get_by_role(role).filter(has_text=text).wait_for()


def confirm(tab: Any, name: str) -> None:
    tab.get_by_role("dialog").get_by_role("button", name=name).click()


def test_an_endpoint_is_made_tried_switched_and_archived(visit: Visit) -> None:
    # A refusal is a status that the browser notes on its console.
    tab = visit("little", "owner", "/console/webhooks", quiet=False)
    tab.get_by_label("URL").fill("https://hooks.example.com/of-the-journey")
    tab.get_by_role("button", name="Make the endpoint").click()
    says(tab, "alert", "choose one at least")
    assert tab.get_by_label("URL").input_value() == "https://hooks.example.com/of-the-journey"
    tab.get_by_label("batch.failed").check()
    tab.get_by_role("button", name="Make the endpoint").click()
    secret = tab.locator(".secret code").inner_text()
    assert secret.startswith("whsec_")
    tab.get_by_role("link", name="https://hooks.example.com/of-the-journey").first.click()
    tab.get_by_role("heading", name="of-the-journey").wait_for()
    assert secret not in tab.content(), "shown once"
    tab.get_by_role("button", name="Send a test event").click()
    says(tab, "status", "is on its way")
    tab.get_by_role("cell", name="webhook.ping", exact=True).wait_for()
    tab.get_by_role("button", name="Switch off").click()
    says(tab, "status", "Nothing is sent")
    assert tab.get_by_role("button", name="Send a test event").count() == 0
    tab.get_by_role("button", name="Switch on").click()
    says(tab, "status", "Events are sent again")
    tab.get_by_role("button", name="New secret").click()
    confirm(tab, "New secret")
    tab.locator(".secret code").wait_for()
    assert tab.locator(".secret code").inner_text() != secret
    tab.get_by_role("button", name="Archive").click()
    confirm(tab, "Archive")
    says(tab, "status", "is archived")
    assert tab.get_by_role("link", name="of-the-journey").count() == 0


def test_what_was_given_up_is_sent_again(visit: Visit) -> None:
    tab = visit("much", "owner", "/console/webhooks")
    tab.get_by_role("link", name="https://hooks.example/much").click()
    tab.get_by_label("State").select_option("dead")
    tab.wait_for_url("**?state=dead*")
    assert tab.locator("tbody tr").count() == 50
    assert HOSTILE in tab.locator("tbody tr").first.inner_text()
    tab.get_by_role("link", name="Next 50").click()
    tab.wait_for_url("**after=*")
    tab.go_back()
    tab.wait_for_url(re.compile(r"\?state=dead$"))
    tab.get_by_role("button", name=re.compile("^Send again: budget")).first.click()
    says(tab, "status", "is sent once more")


@pytest.mark.parametrize("page", ["webhooks", "audit"])
def test_a_reader_sees_no_button_that_would_refuse_them(visit: Visit, page: str) -> None:
    tab = visit("little", "reader", f"/console/{page}", quiet=False)
    posts = tab.locator("main form[method=post]")
    if page == "webhooks":
        tab.get_by_role("link", name="https://hooks.example/little").click()
        tab.get_by_role("heading", name="hooks.example/little").wait_for()
    assert posts.count() == 0


def test_the_audit_log_is_filtered_opened_and_verified(visit: Visit) -> None:
    tab = visit("little", "owner", "/console/audit?action=api_key.created")
    assert {each.strip() for each in tab.locator("tbody td:nth-child(3)").all_inner_texts()} == {
        "api_key.created"
    }
    tab.get_by_role("button", name="Verify now").click()
    says(tab, "status", "The log is whole")
    tab.get_by_text("each as they were recorded, verified").wait_for()
    tab.get_by_role("button", name="Verify now").click()
    says(tab, "status", "The log is whole")
    tab.goto(tab.url.partition("?")[0] + "?action=webhook_endpoint.created")
    tab.locator("tbody a").last.click()
    tab.get_by_role("heading", name="webhook_endpoint.created").wait_for()
    assert "https://hooks.example/little" in tab.locator("tbody").inner_text()
    assert "secret" not in tab.locator("tbody").inner_text()


def test_the_audit_log_names_the_key_that_acted(console: ConsoleServer, sessions: Sessions) -> None:
    """36 digits say nothing to who asks who it was; the id stands in a column of its own."""

    async def act() -> str:
        async with tenant(console.services.db, console.little.id) as conn:
            key = sa.select(api_keys.c.id).where(api_keys.c.name == "nightly-eval")
            key_id = str(await conn.scalar(key))
            for actor in (key_id, console.little.id):
                await record(
                    conn,
                    org_id=console.little.id,
                    actor=Actor(kind="api_key" if actor == key_id else "user", id=actor),
                    action="project.updated",
                    target="who-was-it",
                )
            return key_id

    key_id = console.call(act)
    with httpx.Client(base_url=console.url, cookies=sessions("little", "owner")) as client:
        told = client.get("/console/audit?target=who-was-it&format=csv").text
    rows = list(csv.DictReader(io.StringIO(told.removeprefix("\ufeff"))))
    assert [(row["Who"], row["Actor"]) for row in rows] == [
        ("a link, before anybody was signed in", console.little.id),
        ("nightly-eval", key_id),
    ]


def test_the_fleet_is_the_operators_and_is_renewed_in_place(visit: Visit) -> None:
    tab = visit("little", "owner", "/console/fleet", quiet=False)
    row = tab.get_by_role("region", name="Models").locator("tbody tr")
    assert row.inner_text().split()[:2] == ["b", "upstream"]
    with tab.expect_response("**/console/fleet") as renewed:
        pass
    assert renewed.value.ok
    assert row.count() == 1 and tab.locator("#fleet").count() == 1
    other = visit("much", "owner", "/console", quiet=False)
    assert other.get_by_role("link", name="Models and fleet").count() == 0
    assert other.goto(tab.url).status == 403


def test_settings_have_their_places_and_no_secret(
    visit: Visit, console: ConsoleServer, sessions: Sessions
) -> None:
    tab = visit("little", "owner", "/console/settings")
    rows = tab.get_by_role("region", name="Settings").locator("tbody tr")
    assert any("tollgate.toml:" in each for each in rows.all_inner_texts())
    tab.get_by_label("Find a setting").fill("join_bytes_per_s")
    tab.get_by_label("Find a setting").press("Enter")
    tab.wait_for_url("**q=join_bytes_per_s*")
    assert rows.count() == 1 and rows.inner_text().split()[-1] == "default"
    tab.get_by_label("Find a setting").fill("upstream")
    tab.get_by_label("Find a setting").press("Enter")
    tab.wait_for_url("**q=upstream*")
    assert any("127.0.0.1:1/v1" in each for each in rows.all_inner_texts())
    assert PASSWORD_OF_URL not in tab.content()
    assert HOSTILE in tab.locator("main").inner_text()
    with httpx.Client(base_url=console.url, cookies=sessions("little", "owner")) as client:
        file = client.get("/console/settings?show=all&format=csv").text
    lines = list(csv.DictReader(io.StringIO(file.removeprefix("\ufeff"))))
    assert len(lines) > 50 and {"Setting", "Value", "From"} <= lines[0].keys()
    assert next(each["From"] for each in lines if each["Setting"] == "workers") == "default"
