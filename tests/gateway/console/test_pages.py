"""Every page of the console, as it is registered: in both themes and on a phone, for people of each
role, with little and with much data, in a real Chromium. And what no form of ours sends: it is
refused with words, as is a form of somebody whom it is not for."""

from __future__ import annotations

import re
import runpy
import zlib
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import expect

from gateway.app.application import find_routes
from gateway.console.assets import ADDRESS
from gateway.routes.console.frame.navigation import PAGES
from tests.budget import NIGHT, NIGHTLY
from tests.gateway.console.conftest import NARROW, WIDE, Visit
from tests.gateway.console.seeds import ADDRESSES
from tests.gateway.console.server import ConsoleServer, Organization

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
LOOK = """async (tags) => {
  const found = await axe.run(document, { runOnly: { type: "tag", values: tags } });
  return found.violations.flatMap((each) =>
    each.nodes.map((node) => `${each.id}: ${node.html.slice(0, 200)} ${node.failureSummary}`));
}"""
CUT = """() => [...document.querySelectorAll(".scroll")]
  .filter((each) => !each.closest("details:not([open])"))
  .map((each) => [each.getAttribute("aria-label"), each.scrollWidth - each.clientWidth])
  .filter(([, width]) => width > 1).map(([name, width]) => `${name} is cut by ${width} px`)"""
SHIFTED = """() => new Promise((done) => {
  let sum = 0;
  const observer = new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) sum += entry.value;
  });
  observer.observe({ type: "layout-shift", buffered: true });
  requestAnimationFrame(() => requestAnimationFrame(() => { observer.disconnect(); done(sum); }));
})"""
HEADING = re.compile(r"<h1[^>]*>(.*?)</h1>", re.DOTALL)
TAG = re.compile(r"<[^>]*>")
Sessions = Callable[[str, str], dict[str, str]]


def addresses(console: ConsoleServer, org: Organization) -> list[str]:
    assert find_routes(late=True), "all modules are read"
    found = [page.path for page in PAGES.values() if page.name]
    return found + [each for more in ADDRESSES for each in more(console, org)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("org", "role", "theme", "narrow"),
    [
        ("little", "owner", "light", False),
        ("much", "owner", "dark", False),
        pytest.param("much", "reader", "light", True, marks=NIGHT),
        pytest.param("little", "owner", "dark", True, marks=NIGHT),
        pytest.param("much", "owner", "dark", True, marks=NIGHT),
    ],
)
def test_every_page_can_be_used_by_everybody(
    visit: Visit, console: ConsoleServer, org: str, role: str, theme: str, narrow: bool
) -> None:
    """Axe finds nothing, nothing shifts, is cut or wider than the screen, and no name is a script.
    By day the page of much is made as narrow as a phone when all that is tried, and axe looks at
    each page with little or with much."""
    broken: list[str] = []
    tab = visit(org, role, "/console", theme=theme, narrow=narrow)
    for address in addresses(console, console.organization(org)):
        tab.goto(console.url + address)
        expect(tab.locator(".htmx-request")).to_have_count(0)
        broken += [f"{address}: {each}" for each in what_is_wrong(tab)]
        if NIGHTLY or day_of(address) == org:
            tab.evaluate(AXE.read_text())
            broken += [f"{address}: {each}" for each in tab.evaluate(LOOK, RULES)]
        if org == "much" and not narrow:
            tab.set_viewport_size(NARROW)
            broken += [f"{address}, narrow: {each}" for each in what_is_too_wide(tab)]
            tab.set_viewport_size(WIDE)
    assert broken == []


def day_of(address: str) -> str:
    """The organization with which axe looks at a page by day: one for all pages of a part."""
    part = re.split("[/?]", address)[2]
    return ("little", "much")[zlib.crc32(part.encode()) % 2]


def what_is_wrong(tab: Any) -> list[str]:
    found: list[str] = []
    shifted = tab.evaluate(SHIFTED)
    if shifted > 0.02:
        found.append(f"shifts by {shifted}")
    found += what_is_too_wide(tab)
    if tab.locator("script:not([src])").count():
        found.append("has an inline script")
    if tab.locator("[style]:not(.uplot, .uplot *, .u-legend *, .hairlines a)").count():
        found.append("has an inline style")
    return found


def what_is_too_wide(tab: Any) -> list[str]:
    width = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    cut: list[str] = tab.evaluate(CUT)
    return [f"is {width} px wider than the screen", *cut] if width > 0 else cut


def test_every_page_can_be_read_without_scripts(console: ConsoleServer, sessions: Sessions) -> None:
    """Each has its heading in the answer itself; `test_playground` reads one in a browser."""
    with httpx.Client(base_url=console.url, cookies=sessions("little", "owner")) as client:
        for address in addresses(console, console.little):
            heading = HEADING.search(client.get(address, follow_redirects=True).text)
            assert heading is not None and TAG.sub("", heading[1]).strip(), address


def test_every_page_has_its_policy_and_is_for_its_roles_alone(
    console: ConsoleServer, sessions: Sessions
) -> None:
    """Nobody sees a page without signing in; a reader sees no form of what a reader may not do."""
    with httpx.Client(base_url=console.url) as stranger:
        for address in addresses(console, console.little):
            led = stranger.get(address)
            assert led.status_code == 303, address
            assert led.headers["location"].startswith("/oauth/login?next="), address
        for method, path in routes_of_console(console):
            told = stranger.request(method, console.url + path)
            assert told.status_code in (204, 303, 401), (method, path, told.status_code)
    for role in ("owner", "reader"):
        with httpx.Client(base_url=console.url, cookies=sessions("much", role)) as client:
            for address in addresses(console, console.much):
                shown = client.get(address)
                assert shown.status_code in (200, 403), (address, shown.status_code)
                policy = shown.headers["content-security-policy"]
                assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy and shown.headers["cache-control"] == "no-store"


def test_what_renews_itself_leads_nobody_away_whose_session_has_ended(
    console: ConsoleServer,
) -> None:
    with httpx.Client(base_url=console.url, headers={"hx-request": "true"}) as stranger:
        told = stranger.get("/console/badges")
        assert (told.status_code, told.content) == (204, b"")
        assert stranger.get("/console/keys").headers["hx-redirect"] == "/oauth/login"
        where = {"hx-current-url": f"{console.url}/console/keys?state=active"}
        led = stranger.get("/console/keys", headers=where).headers["hx-redirect"]
        assert led == "/oauth/login?next=%2Fconsole%2Fkeys%3Fstate%3Dactive"
        evil = {"hx-current-url": "https://evil.example/console/../x y"}
        assert stranger.get("/console/keys", headers=evil).headers["hx-redirect"] == "/oauth/login"


def routes_of_console(console: ConsoleServer) -> list[tuple[str, str]]:
    """All routes below /console but its files, which are for everybody."""
    return [
        (str(method), re.sub(r"\{[^}]*\}", "x", route.path))
        for route in console.app.routes
        if route.path.startswith("/console") and not route.path.startswith(ADDRESS)
        for method in route.methods
        if method != "OPTIONS"
    ]


def test_an_expired_session_leads_to_the_login_and_back(
    visit: Visit, console: ConsoleServer
) -> None:
    tab = visit("little", None, "/console/keys?project=x")
    assert "/oauth/login?next=" in tab.url
    tab.get_by_label("E-mail address").fill(console.little.email("admin"))
    tab.get_by_label("Password").fill("correct horse battery")
    tab.get_by_role("button", name="Sign in", exact=True).click()
    tab.wait_for_url("**/console/keys?project=x")
    # The next step of a page that is open: htmx is told to leave as a whole.
    tab.context.clear_cookies(name="tollgate_session")
    tab.get_by_label("State").select_option("active")
    tab.wait_for_url("**/oauth/login?next=*")
    assert "%2Fconsole%2Fkeys" in tab.url


def test_a_form_of_another_site_changes_nothing(console: ConsoleServer, sessions: Sessions) -> None:
    with httpx.Client(base_url=console.url, cookies=sessions("little", "owner")) as client:
        form = {"name": "planted", "inference": "on", "project_id": console.little.project_id}
        for token in ({}, {"form_token": "0" * 64}):
            refused = client.post("/console/keys/create", data={**form, **token})
            assert refused.status_code == 403
        assert "planted" not in client.get("/console/keys").text


def test_the_files_of_others_are_those_of_their_releases() -> None:
    changed = runpy.run_path("requirements/console_files.py")["changed_files"]
    assert list(changed()) == []


FORM_TOKEN = re.compile(r'name="form_token" value="([^"]+)"')
NO_YEAR = "req_ffffffffffff7fffffffffffffffffff"
"""A request of the year 10889, which no calendar here has."""
MANY_DIGITS = "9" * 5000
"""Python reads no number of so many."""
ODD_ADDRESSES = (
    f"/console/requests/{NO_YEAR}",
    f"/console/requests?after={NO_YEAR}",
    f"/console/requests?q={NO_YEAR}",
    f"/console/requests?ms={MANY_DIGITS}&range=1h",
    f"/console/requests?cost={MANY_DIGITS}",
    "/console/requests?ms=nan",
    "/console/usage?from=0001-01-01&to=0002-01-01",
    "/console/usage?from=9999-12-31&to=9999-12-31",
    f"/console/usage?range={MANY_DIGITS}d",
    "/console/overview?lane=%ED%A0%80",
    "/console/keys/%00",
    "/console/keys?after=%00&state=none",
    "/console/mcp/rules?server=x&tool=x&arguments=%5B%5B%5B%7B",
    "/console/billing/invoices/..%2F..%2Fetc/export?as=%2e%2e%2fpdf",
    "/console/audit?after=audit_log-zz",
)
ODD_FORMS = (
    ("/console/keys/create", {"name": "many", "inference": "on", "tokens_per_minute": MANY_DIGITS}),
    ("/console/plans/create", {"name": "many", "tokens_per_minute": MANY_DIGITS}),
    ("/console/plans/create", {"name": "many", "requests_per_minute": "\u0661"}),
    ("/console/mcp/rules/set", {"id": "many", "effect": "ask", "usd": "1e999999"}),
    ("/console/mcp/rules/set", {"id": "many", "effect": "ask", "usd": "nan"}),
    ("/console/billing/credits/give", {"amount_usd": "1e999999"}),
    ("/console/billing/credits/settings", {"low_usd": MANY_DIGITS}),
)


@pytest.fixture
def client(console: ConsoleServer, sessions: Sessions) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=console.url, cookies=sessions("little", "owner")) as found:
        yield found


def token_of(client: httpx.Client) -> str:
    found = FORM_TOKEN.search(client.get("/console/keys").text)
    assert found is not None
    return found[1]


def test_no_address_is_a_fault_of_the_server(client: httpx.Client) -> None:
    told = {address: client.get(address).status_code for address in ODD_ADDRESSES}
    assert {each: status for each, status in told.items() if status >= 500} == {}


def test_no_form_is_a_fault_of_the_server(client: httpx.Client) -> None:
    token = token_of(client)
    for path, form in ODD_FORMS:
        told = client.post(path, data={**form, "form_token": token})
        assert told.status_code == 400, (path, form, told.status_code)
        assert 'role="alert"' in told.text, path


def test_a_name_beyond_latin_1_leads_to_its_page(client: httpx.Client) -> None:
    """A redirect stands in a header, which has no letters beyond Latin-1."""
    for name in ("\u8ba1\u5212", "half? #1"):
        form = {"name": name, "form_token": token_of(client)}
        made = client.post("/console/plans/create", data=form)
        assert made.status_code == 303, made.text
        assert made.headers["location"] == f"/console/plans/{quote(name, safe='')}"
        assert client.get(made.headers["location"]).status_code == 200
        ended = client.post(
            f"{made.headers['location']}/archive", data={"form_token": form["form_token"]}
        )
        assert ended.status_code == 303


@pytest.mark.parametrize("name", ["a/b", "..", "50%2F off", "/", "a/../b"])
def test_a_plan_is_opened_and_changed_whatever_its_name(client: httpx.Client, name: str) -> None:
    form = {"name": name, "form_token": token_of(client)}
    path = client.post("/console/plans/create", data=form).headers["location"]
    shown = client.get(path)
    assert shown.status_code == 200 and f"<h1>{escape(name)}</h1>" in shown.text
    assert f'href="{path}"' in client.get("/console/plans").text
    for act in ("update", "archive"):
        assert f'action="{path}/{act}"' in shown.text
        done = client.post(f"{path}/{act}", data={"form_token": form["form_token"]})
        assert done.status_code == 303, act
        shown = client.get(path)
    assert "archived" in shown.text


def test_the_id_of_an_invoice_is_found_below_invoices(client: httpx.Client) -> None:
    shown = client.get("/console/billing").text
    invoice = re.search(r"/console/billing/invoices/(inv_\w+)", shown)
    assert invoice is not None
    found = client.get(f"/console/search?q={invoice[1]}").text
    assert f'href="/console/billing/invoices/{invoice[1]}"' in found


FOR_ALL = {"/console/theme", "/console/sign-out"}
"""Forms that no role is refused."""
LOOKED_UP = {
    "/console/playground/completions",
    *(f"/console/keys/x/{act}" for act in ("update", "rotate", "revoke")),
}
"""Their things are looked up before anybody knows whether they may: there are none."""


def forms_of(console: ConsoleServer) -> list[str]:
    found = [path for method, path in routes_of_console(console) if method == "POST"]
    return [path for path in found if path not in FOR_ALL]


def things_of(console: ConsoleServer) -> set[str]:
    """Return the addresses of things of little."""
    pages = {page.path for page in PAGES.values()}
    shown = [each.partition("?")[0] for each in addresses(console, console.little)]
    return {each for each in shown if each.count("/") > 2 and each not in pages}


def acts_below(console: ConsoleServer, things: set[str]) -> Iterator[str]:
    """Yield the addresses of the forms of things, by the table of routes."""
    for route in forms_of(console):
        before, x, act = route.partition("/x/")
        for path in sorted(things):
            if x and path.rpartition("/")[0] == before and "/x/" not in act:
                yield f"{path}/{act}"


def test_a_reader_is_refused_every_form(console: ConsoleServer, sessions: Sessions) -> None:
    """A form is sent by hand, with a token that is good."""
    with httpx.Client(base_url=console.url, cookies=sessions("little", "reader")) as reader:
        token = token_of(reader)
        sent = {"form_token": token, "project_id": console.little.project_id}
        headers = {"x-form-token": token}

        def told(path: str) -> int:
            return reader.post(path, data=sent, headers=headers).status_code

        everywhere = {path: told(path) for path in forms_of(console)}
        assert len(everywhere) > 40
        assert {path for path, status in everywhere.items() if status != 403} == LOOKED_UP
        assert {everywhere[path] for path in LOOKED_UP} == {404}
        of_things = {path: told(path) for path in acts_below(console, things_of(console))}
        assert len(of_things) > 10 and set(of_things.values()) == {403}, of_things


def test_the_owner_of_another_organization_changes_nothing(
    console: ConsoleServer, sessions: Sessions
) -> None:
    """Each form of a thing of little's is sent by the owner of much, who operates nothing."""
    things, named = things_of(console), f"?org_id={console.little.id}"
    with httpx.Client(base_url=console.url, cookies=sessions("much", "owner")) as stranger:
        sent = {"form_token": token_of(stranger), "name": "taken over"}
        for address in acts_below(console, things):
            told = stranger.post(address + named, data=sent)
            assert 400 <= told.status_code < 500, (address, told.status_code)
        for address in ("billing", "billing/credits", "billing/reratings"):
            assert stranger.get(f"/console/{address}{named}").status_code == 403, address
        for address in sorted(things):
            if not address.startswith("/console/plans/"):  # they are the installation's
                assert stranger.get(address).status_code in (403, 404), address
