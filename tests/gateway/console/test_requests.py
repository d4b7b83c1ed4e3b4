"""Overview, usage and requests: what one page says the next one says, too; requests come in as they
are answered, and nobody sees another organization's."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace

import httpx
import msgspec
import pytest
import sqlalchemy as sa

from gateway.audit.log import COMMAND_LINE, record
from gateway.db import tenant
from gateway.request_log.writer import RequestLog
from gateway.routes.console import requests
from gateway.routes.console.requests import PriceLine
from gateway.settings.file import TracesConfig
from tests.gateway.console.conftest import Visit
from tests.gateway.console.server import ConsoleServer, Organization
from tests.gateway.console.test_pages import CUT
from tests.gateway.request_log.console_seeds import HOSTILE_TEXT, request_of

Sessions = Callable[[str, str], dict[str, str]]
WAIT_MS = 30_000


def asked(console: ConsoleServer, sessions: Sessions, org: str) -> httpx.Client:
    return httpx.Client(base_url=console.url, cookies=sessions(org, "reader"))


def newest_of(console: ConsoleServer, org: Organization) -> str:
    async def find() -> str:
        async with tenant(console.services.db, org.id) as conn:
            query = "SELECT id FROM request_log WHERE status = 200 ORDER BY at DESC LIMIT 1"
            return str((await conn.scalar(sa.text(query))).hex)

    return f"req_{console.call(find)}"


def test_a_figure_leads_to_its_parts_and_to_its_requests(
    visit: Visit, console: ConsoleServer
) -> None:
    tab = visit("little", "reader", "/console/overview")
    tab.get_by_role("link", name="web", exact=True).click()
    tab.wait_for_url(re.compile("/console/usage"))
    row = tab.locator("tbody tr", has_text="penny").last
    number = row.locator("td").nth(1).inner_text()
    row.locator("td").nth(1).get_by_role("link").click()
    tab.wait_for_url(re.compile("/console/requests.*model=penny"))
    assert tab.locator("#found tbody tr").count() == int(number)
    tab.locator("#found tbody tr a").first.click()
    tab.wait_for_url(re.compile("/console/requests/req_"))
    assert tab.locator(".water svg").count() >= 5
    assert "Why the cache stopped" in tab.inner_text("main")
    tab.go_back()
    tab.wait_for_url(re.compile("model=penny"))


def test_what_was_changed_is_a_line_over_the_charts(visit: Visit, console: ConsoleServer) -> None:
    org = console.little

    async def change() -> None:
        async with tenant(console.services.db, org.id) as conn:
            for name in ("<b>one</b>", "two"):
                await record(
                    conn, org_id=org.id, actor=COMMAND_LINE, action="plan.updated", target=name
                )

    console.call(change)
    for page in ("overview", "usage"):
        tab = visit("little", "owner", f"/console/{page}")
        line = tab.locator("figure.chart .hairlines a").first
        line.focus()
        assert "plan <b>one</b> changed" in line.inner_text() and "plan two" in line.inner_text()
        tab.locator("figure.chart summary").first.click()
        listed = tab.locator("figure.chart .changes").first
        assert "plan two changed" in listed.inner_text()
        line.press("Enter")
        tab.wait_for_url(re.compile("/console/audit/"))
    tab = visit("little", "reader", "/console/overview")
    assert tab.locator("figure.chart .hairlines a").count() == 0, "they may not read the log"


def test_what_each_request_cost_is_in_sight(visit: Visit) -> None:
    """Its column is the last one; on a phone the table scrolls."""
    tab = visit("much", "owner", "/console/requests")
    assert tab.locator("#found th").last.inner_text() == "Cost"
    hidden = "th => (box => box.scrollWidth - box.clientWidth)(th.closest('table').parentElement)"
    assert tab.locator("#found th").last.evaluate(hidden) <= 0


@pytest.mark.parametrize("narrow", [False, True])
def test_the_price_of_a_request_is_in_sight(
    visit: Visit, console: ConsoleServer, monkeypatch: pytest.MonkeyPatch, narrow: bool
) -> None:
    """Its amounts, to the pico-dollar, and its entries, on a phone as well."""
    pico = {"charged": 3_412_500_000_001, "uncached input": 1_292_000_001}
    lines = [
        PriceLine(component=name, quantity=None, rate="1", amount_pico=amount)
        for name, amount in pico.items()
    ]
    entry = {"credit": "revenue:penny", "kind": "usage", "corrects": None, "id": f"tr_{'0' * 32}"}
    entry |= {"posted_at": datetime.now(UTC), "debit": f"receivable:{console.little.id}"}
    entries = [SimpleNamespace(**entry, amount_pico=pico["uncached input"])]

    async def found(*_: object) -> object:
        return SimpleNamespace(charged_pico=pico["charged"], transfers=entries)

    monkeypatch.setattr(requests, "find_record", found)
    monkeypatch.setattr(requests, "lines_of", lambda _: lines)
    address = f"/console/requests/{newest_of(console, console.little)}"
    tab = visit("little", "owner", address, narrow=narrow)
    for text in ("0.001292000001", "3.412500000001", "$\u00a00.001292"):
        box = tab.locator(".scroll td").filter(has_text=text).last.bounding_box()
        assert 0 < box["x"] and box["x"] + box["width"] <= tab.viewport_size["width"], text
    assert tab.evaluate(CUT) == []


def test_requests_come_in_while_somebody_watches(visit: Visit, console: ConsoleServer) -> None:
    tab = visit("little", "owner", "/console/requests")
    before = tab.locator("#found tbody tr").count()
    tab.get_by_role("button", name="Watch live").click()
    tab.get_by_text("Live: new requests come in above.").wait_for(timeout=WAIT_MS)
    # The badges are renewed when the page is loaded and each minute.
    tab.evaluate("() => htmx.ajax('GET', '/console/badges', {target: 'nav', swap: 'none'})")
    org = console.little

    async def answer() -> str:
        log = RequestLog(console.services.system_db, keep_days=30, on_dropped=lambda number: None)
        row = request_of(org, ["key_live"], 0)
        log.put(row)
        await log.flush()
        return row.id

    made = console.call(answer)
    tab.locator(f"#r{made}").wait_for(timeout=WAIT_MS)
    assert tab.locator("#found tbody tr").first.get_attribute("id") == f"r{made}"
    assert tab.locator("#found tbody tr").count() == before + 1
    when = tab.locator(f"#r{made} time").inner_text()
    assert re.fullmatch(r"\d\d:\d\d:\d\d", when), "it stays right while the page stays"
    tab.get_by_role("button", name="Pause").click()
    tab.get_by_text("Paused.").wait_for(timeout=WAIT_MS)


def test_who_signs_out_watches_no_longer(
    console: ConsoleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another tab, which leaves the stream of this one open."""
    monkeypatch.setattr(requests, "KEEP_ALIVE_S", 0.05)
    cookies = console.session(console.little, "reader")
    with httpx.Client(base_url=console.url, cookies=cookies, timeout=WAIT_MS / 1000) as client:
        with client.stream("GET", "/console/requests/live") as stream:
            lines = stream.iter_lines()
            for line in lines:
                if line.startswith(":"):
                    break  # it is kept open
            page = client.get("/console/requests").text
            token = re.search('name="form-token" content="([^"]+)"', page)
            assert token is not None
            done = client.post("/console/sign-out", data={"form_token": token[1]})
            assert done.status_code == 303
            for _ in lines:
                pass  # until it ends


def test_a_request_is_shown_to_its_organization_alone(
    console: ConsoleServer, sessions: Sessions
) -> None:
    theirs = newest_of(console, console.much)
    with asked(console, sessions, "much") as mine:
        assert mine.get(f"/console/requests/{theirs}").status_code == 200
        searched = mine.get(f"/console/requests?q={theirs}")
        assert searched.headers["location"].endswith(theirs)
        of_batch = mine.get("/console/requests?q=batch_1").headers["location"]
        assert "batch=batch_1" in of_batch and "No requests like these" in mine.get(of_batch).text
    with asked(console, sessions, "little") as other:
        for address in (theirs, "req_1", "req_" + "0" * 32, "%00"):
            assert other.get(f"/console/requests/{address}").status_code == 404, address
        assert other.get("/console/requests?q=nothing").status_code == 200


def test_a_request_leads_to_its_trace_where_they_are_looked_at(
    console: ConsoleServer, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"/console/requests/{newest_of(console, console.little)}"
    configuration = console.services.configuration
    with asked(console, sessions, "little") as client:
        assert "Open the trace" not in client.get(address).text
        traces = TracesConfig(
            endpoint="http://127.0.0.1:9", view_url="https://traces.example/t/{trace}?a=1&b=2"
        )
        settings = msgspec.structs.replace(configuration.settings, traces=traces)
        monkeypatch.setattr(configuration, "settings", settings)
        shown = client.get(address).text
    trace = re.search(r'data-copy="([0-9a-f]{32})"', shown)
    assert trace is not None
    assert f'href="https://traces.example/t/{trace[1]}?a=1&amp;b=2"' in shown


@pytest.mark.parametrize(
    "address", ["https://traces.example/", "javascript:{trace}", 'http://h/"{trace}', "{trace}"]
)
def test_the_address_of_traces_is_one_with_a_place_for_the_trace(address: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="view_url"):
        msgspec.convert({"endpoint": "http://127.0.0.1:9", "view_url": address}, TracesConfig)


def test_a_failed_request_says_why_and_leads_to_those_like_it(visit: Visit) -> None:
    tab = visit("much", "reader", "/console/requests?outcome=failed&range=7d")
    row = tab.locator("#found tbody tr").first
    assert "503" in row.inner_text() and "overloaded" in row.inner_text()
    row.get_by_role("link").click()
    told = tab.locator(".message.err")
    assert "Answered with 503 overloaded." in told.inner_text()
    told.get_by_role("link", name="Others like it").click()
    tab.wait_for_url(re.compile("error_code=overloaded"))
    shown = tab.locator("#found tbody tr").all_inner_texts()
    assert shown and all("overloaded" in each for each in shown)
    tab.get_by_role("link", name="Error: overloaded").click()
    tab.wait_for_url(re.compile("/console/requests(?!.*error_code)"))


def test_texts_are_shown_to_who_may_read_them_as_what_they_are(
    visit: Visit, console: ConsoleServer, sessions: Sessions
) -> None:
    address = f"/console/requests/{newest_of(console, console.much)}"
    tab = visit("much", "admin", address)
    tab.locator("#texts .turn").first.wait_for(timeout=WAIT_MS)
    shown = tab.locator("#texts").inner_text()
    assert shown.count(HOSTILE_TEXT) == 3 and tab.locator("#texts img, #texts .text b").count() == 0
    assert "You are kind." in shown and "calls look" in shown
    now, before = tab.locator("#texts .break .miss").all_inner_texts()
    assert now != before and now.endswith(". Be brief.") and before.endswith(". Be brief.")
    assert tab.locator("#texts .break .hit mark").count() == 2, "what nobody sees is marked"
    assert "in block 56" in tab.inner_text("main")
    assert "\u202e" not in shown and "You are kind.\\u{202E} It is" in shown
    with httpx.Client(base_url=console.url, cookies=sessions("much", "admin")) as admin:
        audited = admin.get("/console/audit").text
    assert "request.content.read" in audited and "You are kind." not in audited
    with asked(console, sessions, "much") as reader:
        page = reader.get(address).text
        assert "Owners and admins of the organization" in page and "Be brief" not in page
        refused = reader.get(f"{address}/content")
        assert refused.status_code == 403 and "Be brief" not in refused.text
    mine = f"/console/requests/{newest_of(console, console.little)}"
    with httpx.Client(base_url=console.url, cookies=sessions("little", "admin")) as other:
        assert other.get(f"{address}/content").status_code == 404
        assert other.get(f"{mine}/content").status_code == 404
        assert "none are stored" in other.get(mine).text


def test_a_filter_that_cannot_be_read_is_named(console: ConsoleServer, sessions: Sessions) -> None:
    with asked(console, sessions, "little") as client:
        for query in (
            "cost=x",
            "cost=-1",
            "ms=nan",
            "ttft=1e99",
            "outcome=odd",
            "lane=odd",
            "tag=x",
        ):
            answer = client.get(f"/console/requests?{query}")
            assert answer.status_code == 400, query
        assert client.get("/console/usage?by=odd").status_code == 400
        assert client.get(f"/console/usage?by=tag&tag={'x' * 99}").status_code == 400


def test_each_table_of_a_page_has_its_csv(console: ConsoleServer, sessions: Sessions) -> None:
    found: dict[str, str] = {}
    with httpx.Client(base_url=console.url, cookies=sessions("little", "owner")) as client:
        for page in ("overview", "usage", "settings"):
            shown = html.unescape(client.get(f"/console/{page}").text)
            for address, name in re.findall(r'href="([^"]*format=csv&table=(\w+))"', shown):
                answer = client.get(address)
                assert answer.headers["content-type"].startswith("text/csv"), address
                found[name] = answer.text
    assert found.keys() >= {*("first_tokens", "next_tokens", "goodputs", "projects"), "items"}
    assert found.keys() >= {"spend", "chart"}
    assert len({*found.values()}) == len(found), "no table is answered with another"


def test_what_is_shown_is_there_as_csv(console: ConsoleServer, sessions: Sessions) -> None:
    with asked(console, sessions, "little") as client:
        for address, head in (
            ("/console/overview", "Time,Uncached,Cached,Written,Output,Requests,Spend"),
            ("/console/usage?by=key", "Key,Requests,Input"),
            ("/console/requests", "When,Request,Status,Error"),
        ):
            sep = "&" if "?" in address else "?"
            answer = client.get(f"{address}{sep}format=csv")
            assert answer.headers["content-type"].startswith("text/csv")
            assert answer.text.lstrip("\ufeff").startswith(head), address
