"""Journeys through the console's own pages in a browser: keys, projects, people, search and the
keyboard; and what names that attack do to them."""

from __future__ import annotations

import csv
import io
import os
import re
import signal
from collections.abc import Callable

import httpx
import psutil
import pytest
from playwright.sync_api import expect

from tests.gateway.console import conftest
from tests.gateway.console.conftest import Contexts, Visit
from tests.gateway.console.seeds import HOSTILE, MANY
from tests.gateway.console.server import PASSWORD, ConsoleServer

Sessions = Callable[[str, str], dict[str, str]]


def test_a_key_is_made_shown_once_rotated_and_revoked(visit: Visit) -> None:
    tab = visit("little", "admin", "/console/keys")
    tab.locator("#make").get_by_label("Name").fill("a journey")
    tab.get_by_label("Budget in USD").fill("12.50")
    tab.get_by_role("button", name="Make the key").click()
    made = tab.locator(".secret code")
    made.wait_for()
    first = made.inner_text()
    assert re.fullmatch(r"sk-tg-[0-9A-Za-z]{43}", first)
    tab.reload()
    assert first not in tab.content(), "this once"
    tab.get_by_role("link", name="a journey").click()
    assert "$\u00a012.50" in tab.locator("table").first.inner_text()
    tab.get_by_role("button", name="Rotate").click()
    tab.get_by_role("dialog").get_by_role("button", name="Rotate").click()
    made.wait_for()
    assert made.inner_text() != first
    assert "good until" in tab.locator(".facts").inner_text()
    tab.get_by_role("button", name="Revoke").click()
    tab.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    tab.get_by_role("button", name="Revoke").click()
    tab.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    tab.get_by_role("status").wait_for()
    assert "a journey is revoked" in tab.get_by_role("status").inner_text()
    assert "revoked" in tab.get_by_role("row", name="a journey").inner_text()
    tab.go_back()
    tab.get_by_role("heading", name="a journey", exact=True).wait_for()
    assert tab.get_by_role("button", name="Revoke").count() == 0, "it has ended"


def test_a_refused_form_keeps_what_was_typed_and_names_the_field(visit: Visit) -> None:
    tab = visit("little", "owner", "/console/keys", quiet=False)
    tab.locator("#make").get_by_label("Name").fill("typed")
    tab.get_by_label("Budget in USD").fill("much")
    tab.get_by_role("button", name="Make the key").click()
    tab.get_by_role("alert").wait_for()
    assert "amount of USD" in tab.get_by_role("alert").inner_text()
    assert tab.locator("#make").get_by_label("Name").input_value() == "typed"
    assert tab.get_by_label("Budget in USD").get_attribute("aria-invalid") == "true"


def test_forms_work_without_scripts(visit: Visit) -> None:
    tab = visit("little", "owner", "/console/projects", script=False)
    tab.get_by_label("Name").fill("without a script")
    tab.get_by_role("button", name="Make the project").click()
    assert "without a script is there" in tab.get_by_role("status").inner_text()
    assert tab.locator("h1").inner_text() == "without a script"
    tab.reload()
    assert tab.get_by_role("status").count() == 0, "it is said once"


def test_people_are_invited_appointed_and_led_to_a_password(visit: Visit) -> None:
    tab = visit("little", "admin", "/console/people")
    roles = tab.get_by_label("Role").inner_text()
    assert "admin:" in roles and "owner:" not in roles, "no role that is more than theirs"
    tab.get_by_label("E-mail address").fill("new@little.example")
    tab.get_by_role("button", name="Make the link").click()
    tab.locator(".secret code").wait_for()
    assert "/invites/accept?token=" in tab.locator(".secret code").inner_text()
    tab.get_by_role("button", name="Withdraw").click()
    tab.get_by_role("dialog").get_by_role("button", name="Withdraw").click()
    tab.get_by_text("The invitation is withdrawn").wait_for()
    tab.get_by_role("link", name="billing@little.example").click()
    tab.get_by_label("Role in the organization").select_option("reader")
    tab.get_by_role("button", name="Change the role").click()
    tab.get_by_text("billing@little.example is reader").wait_for()
    tab.get_by_label("Role in the organization").select_option("billing")
    tab.get_by_role("button", name="Change the role").click()
    tab.get_by_text("billing@little.example is billing").wait_for()
    tab.get_by_role("button", name="Make a link").click()
    tab.locator(".secret code").wait_for()
    assert "/passwords/reset?token=" in tab.locator(".secret code").inner_text()


def test_operators_make_and_change_plans_and_others_read_them(
    visit: Visit, console: ConsoleServer, sessions: Sessions
) -> None:
    tab = visit("little", "owner", "/console/plans")
    tab.get_by_label("Name").fill("small")
    tab.get_by_label("Tokens per minute (TPM)").fill("60,000")
    tab.get_by_role("button", name="Make the plan").click()
    tab.get_by_text("The plan small can be given.").wait_for()
    tab.get_by_label("Tokens per minute (TPM)").fill("90000")
    tab.get_by_role("button", name="Save changes").click()
    tab.get_by_text("Every worker goes by it").wait_for()
    assert "90,000" in tab.locator(".facts").inner_text()
    with httpx.Client(base_url=console.url, cookies=sessions("much", "owner")) as client:
        shown = client.get("/console/plans").text
        assert "90,000 tokens per minute" in shown and "Make the plan" not in shown
        token = re.search(r'name="form-token" content="(\w+)"', shown)
        assert token is not None
        form = {"form_token": token[1], "name": "theirs"}
        assert client.post("/console/plans/create", data=form).status_code == 403
    tab.get_by_role("button", name="Archive").click()
    tab.get_by_role("dialog").get_by_role("button", name="Archive").click()
    tab.get_by_text("small can no longer be given").wait_for()


def test_an_owner_of_a_project_administers_it_alone(
    console: ConsoleServer, sessions: Sessions
) -> None:
    with httpx.Client(base_url=console.url, cookies=sessions("little", "developer")) as client:
        path = f"/console/projects/{console.little.project_id}"
        shown = client.get(path).text
        assert "Add a member" in shown and "Archive" not in shown
        token = re.search(r'name="form-token" content="(\w+)"', shown)
        assert token is not None
        form = {"form_token": token[1], "email": console.little.email("billing")}
        added = client.post(f"{path}/members", data={**form, "role": "member"})
        assert added.status_code == 303, added.text
        refused = client.post(f"{path}/archive", data=form)
        assert refused.status_code == 403
        elsewhere = f"/console/people/{console.little.users['reader']}/remove"
        assert client.post(elsewhere, data=form).status_code == 403


def test_who_only_reads_is_shown_no_button_that_would_refuse_them(
    console: ConsoleServer, sessions: Sessions
) -> None:
    with httpx.Client(base_url=console.url, cookies=sessions("much", "reader")) as client:
        for path in ("/console/keys", "/console/projects", "/console/people"):
            posts = re.findall(r'method="post" action="([^"]+)"', client.get(path).text)
            assert set(posts) == {"/console/theme", "/console/sign-out"}, path
        form = {"form_token": "x", "name": "n", "inference": "on"}
        assert client.post("/console/keys/create", data=form).status_code == 403


def test_hundreds_of_keys_are_paged_and_all_there(
    console: ConsoleServer, sessions: Sessions
) -> None:
    with httpx.Client(base_url=console.url, cookies=sessions("much", "reader")) as client:
        path, seen = "/console/keys", []
        for _ in range(MANY):
            shown = client.get(path).text
            seen += re.findall(r'href="/console/keys/(key_\w+)"', shown)
            following = re.search(r'href="([^"]+)" rel="next"', shown)
            if following is None:
                break
            path = following[1].replace("&amp;", "&")
        assert len(seen) == len(set(seen)) == MANY + 1


def test_names_that_attack_are_shown_as_they_are(
    visit: Visit, console: ConsoleServer, sessions: Sessions
) -> None:
    tab = visit("much", "owner", f"/console/search?q={HOSTILE[2:10]}")
    asked: list[str] = []
    tab.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    shown = HOSTILE[:100]
    assert tab.get_by_role("link", name=shown, exact=True).count() == 2, "a key and a project"
    tab.get_by_role("link", name=shown, exact=True).last.click()
    assert tab.locator("h1").inner_text() == shown
    assert asked == [] and "49" not in tab.locator("h1").inner_text()
    with httpx.Client(base_url=console.url, cookies=sessions("much", "owner")) as client:
        found = client.get("/console/keys", params={"q": "<script>", "format": "csv"})
    assert found.headers["content-disposition"].startswith("attachment; filename=")
    rows = list(csv.reader(io.StringIO(found.content.decode("utf-8-sig"))))
    assert rows[0][0] == "Name" and rows[1][0] == shown and len(rows) == 2


def test_keys_of_the_keyboard_lead_and_help(visit: Visit) -> None:
    tab = visit("little", "owner", "/console/projects")
    tab.clock.set_fixed_time("2026-01-01")  # `g` and its letter are never too far apart
    tab.keyboard.press("?")
    assert "search ids, keys" in tab.get_by_role("dialog").inner_text()
    tab.keyboard.press("Escape")  # the keys that follow are the page's, in the same frame even
    tab.keyboard.press("g")
    tab.keyboard.press("k")
    tab.wait_for_url("**/console/keys")
    tab.keyboard.press("/")
    tab.wait_for_url("**/console/search")
    tab.get_by_role("searchbox", name="Search").fill("nightly")
    tab.keyboard.press("Enter")
    tab.get_by_role("link", name="nightly-eval").wait_for()


def test_times_are_the_viewers_from_the_first_page_on(visit: Visit, console: ConsoleServer) -> None:
    tab = visit("little", None, "/console/keys")
    tab.get_by_label("E-mail address").fill(console.little.email("reader"))
    tab.get_by_label("Password").fill(PASSWORD)
    tab.get_by_role("button", name="Sign in", exact=True).click()
    tab.wait_for_url("**/console/keys")
    assert "Times of Europe/Vienna" in tab.locator(".who").inner_text()


def test_a_theme_is_kept_and_the_page_stays(visit: Visit) -> None:
    tab = visit("little", "owner", "/console/keys?state=active")
    tab.get_by_role("button", name="Dark theme").click()
    tab.wait_for_selector('html[data-theme="dark"]')
    assert tab.url.endswith("/console/keys?state=active")
    assert tab.get_by_role("button", name="Dark theme").count() == 0


def test_filters_answer_at_once_and_the_back_button_goes_back(visit: Visit) -> None:
    tab = visit("little", "owner", "/console/keys")
    tab.locator("form.filters").get_by_label("State").select_option("revoked")
    tab.wait_for_url("**state=revoked**")
    tab.get_by_label("State").select_option("active")
    tab.wait_for_url("**state=active**")
    tab.go_back()
    expect(tab.locator("select[name=state]")).to_have_value("revoked")
    tab.wait_for_load_state("networkidle")
    tab.go_back()
    tab.wait_for_url("**/console/keys")


def test_a_browser_that_hangs_is_replaced(
    visit: Visit, contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs a minute, and no other test anything."""
    monkeypatch.setattr(conftest, "CLOSE_S", 3.0)
    visit("little", "owner", "/console/keys")
    for child in psutil.Process().children(recursive=True):
        if "chromium" in child.name() and child.parent().name() != child.name():
            os.kill(child.pid, signal.SIGSTOP)
    contexts.take_back()
    tab = visit("little", "owner", "/console/keys")
    expect(tab.get_by_role("main")).to_be_visible()
