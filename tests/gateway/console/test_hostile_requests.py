"""Values that no form of ours sends, in addresses and forms of the console: each is refused with
words, and none is a fault of the server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from urllib.parse import quote

import httpx
import pytest

from tests.gateway.console.server import ConsoleServer

Sessions = Callable[[str, str], dict[str, str]]
FORM_TOKEN = re.compile(r'name="form_token" value="([^"]+)"')
NO_YEAR = "req_ffffffffffff7fffffffffffffffffff"
"""A request of the year 10889, which no calendar here has."""
MANY_DIGITS = "9" * 5000
"""Python reads no number of so many."""
ADDRESSES = (
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
FORMS = (
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
    told = {address: client.get(address).status_code for address in ADDRESSES}
    assert {each: status for each, status in told.items() if status >= 500} == {}


def test_no_form_is_a_fault_of_the_server(client: httpx.Client) -> None:
    token = token_of(client)
    for path, form in FORMS:
        told = client.post(path, data={**form, "form_token": token})
        assert told.status_code == 400, (path, form, told.status_code)
        assert 'role="alert"' in told.text, path


def test_a_name_beyond_latin_1_leads_to_its_page(client: httpx.Client) -> None:
    """What a form leads to stands in a header."""
    for name in ("\u8ba1\u5212", "half? #1"):
        form = {"name": name, "form_token": token_of(client)}
        made = client.post("/console/plans/create", data=form)
        assert made.status_code == 303, made.text
        assert made.headers["location"] == f"/console/plans/{quote(name, safe='')}"
        assert client.get(made.headers["location"]).status_code == 200


def test_the_id_of_an_invoice_is_found_below_invoices(client: httpx.Client) -> None:
    shown = client.get("/console/billing").text
    invoice = re.search(r"/console/billing/invoices/(inv_\w+)", shown)
    assert invoice is not None
    found = client.get(f"/console/search?q={invoice[1]}").text
    assert f'href="/console/billing/invoices/{invoice[1]}"' in found
