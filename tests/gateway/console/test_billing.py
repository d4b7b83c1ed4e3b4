"""The pages of billing are used in a real Chromium, by who may; others see and change nothing."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from gateway.routes.console.billing.credits import lasts
from tests.billing.console_seeds import invoice_addresses
from tests.gateway.console.conftest import Visit
from tests.gateway.console.seeds import HOSTILE, MANY
from tests.gateway.console.server import ConsoleServer

Sessions = Callable[[str, str], dict[str, str]]
INVOICES, CREDITS = "/console/billing", "/console/billing/credits"
PRICES, RERATINGS = "/console/billing/prices", "/console/billing/reratings"
DRAFT = """[[price]]
model = "penny"
valid_from = "2030-01-01"
uncached_input = "0.12"
output = "0.30"

[[discount]]
price_list = "acme"
percent = "15"
valid_from = "2030-01-01"
"""


def confirm(tab: Any, name: str) -> None:
    tab.get_by_role("dialog").get_by_role("button", name=name).click()


def says(tab: Any, text: str) -> None:
    tab.get_by_role("status").get_by_text(text).wait_for()


async def rows(console: ConsoleServer, query: str, **values: Any) -> list[Any]:
    async with console.services.system_db.connect() as conn:
        return list(await conn.execute(sa.text(query), values))


def test_a_payment_is_recorded_once_it_fits(visit: Visit, console: ConsoleServer) -> None:
    tab = visit("little", "owner", INVOICES, quiet=False)
    tab.get_by_role("link", name="TG-000002").click()
    amount = tab.get_by_label("Amount, USD")
    amount.fill("1.00")
    tab.get_by_label("Reference").fill("bank 7")
    tab.get_by_role("button", name="Record the payment").click()
    refused = tab.get_by_role("alert")
    refused.get_by_text("at most what is due").wait_for()
    assert amount.input_value() == "1.00" and amount.get_attribute("aria-invalid") == "true"
    amount.fill("0.45")
    tab.get_by_role("button", name="Record the payment").click()
    says(tab, "A payment of 0.45 is recorded.")
    assert tab.get_by_role("cell", name="bank 7").count() == 1
    assert tab.get_by_role("button", name="Record the payment").count() == 0, "nothing is due"
    tab.go_back()
    query = "SELECT action FROM audit_entries WHERE action = 'payment.created' AND org_id = :org"
    assert len(console.call(lambda: rows(console, query, org=console.little.id))) == 1


def test_a_draft_of_prices_is_applied_as_it_was_seen(visit: Visit, console: ConsoleServer) -> None:
    tab = visit("little", "owner", PRICES, quiet=False)
    tab.get_by_label("Price book, as TOML").fill("[[price]]\nmodel = 3")
    tab.get_by_role("button", name="Compare").click()
    tab.get_by_role("alert").get_by_text("model must be a name").wait_for()
    tab.get_by_label("Price book, as TOML").fill(DRAFT)
    tab.get_by_label("Name").fill("winter")
    tab.get_by_role("button", name="Compare").click()
    changes = tab.get_by_role("table", name="What the draft changes")
    changes.wait_for()
    output = changes.get_by_role("row").filter(has_text="Output").inner_text()
    assert output.split() == [
        *("penny", "default", "Output", "–", "0.4", "0.3", "-25.0", "%"),
        *("2030-01-01", "01:00"),
    ]
    assert "15 % off" in tab.get_by_role("table", name="What else would be agreed").inner_text()
    tab.evaluate("document.querySelector('[name=digest]').value = '0'.repeat(64)")
    tab.get_by_role("button", name="Put in force").click()
    confirm(tab, "Put in force")
    tab.get_by_role("alert").get_by_text("look at it again").wait_for()
    tab.get_by_role("button", name="Compare").click()
    changes.wait_for()
    tab.get_by_role("button", name="Put in force").click()
    confirm(tab, "Put in force")
    says(tab, "The price book winter is stored")
    query = "SELECT name FROM installation_items WHERE kind = 'price_book'"
    assert [each.name for each in console.call(lambda: rows(console, query))] == ["winter"]


def test_a_balance_says_when_it_is_dry(console: ConsoleServer, sessions: Sessions) -> None:
    with httpx.Client(base_url=console.url, cookies=sessions("little", "owner")) as client:
        assert "Spent recently" in client.get(CREDITS).text, "it pays by invoice"
    assert lasts(0, None) == "used up"
    assert lasts(1, None) == "as long as nothing is spent"
    assert lasts(1, 4.2) == "4 days" and lasts(1, 0.5) == "12\u00a0h"


def test_credit_is_given_taken_back_and_topped_up(visit: Visit) -> None:
    tab = visit("little", "owner", CREDITS, quiet=False)
    tab.get_by_label("Amount, USD").fill("nothing")
    tab.get_by_role("button", name="Give credit").click()
    tab.get_by_role("alert").wait_for()
    tab.get_by_label("Amount, USD").fill("12.50")
    tab.get_by_role("button", name="Give credit").click()
    says(tab, "12.5 USD of credit were given.")
    given = tab.get_by_role("row").filter(has_text="12.50").first
    given.get_by_role("button", name="Take back").click()
    confirm(tab, "Take back")
    says(tab, "What was left of the 12.5 USD is taken back.")
    tab.get_by_role("button", name="Grant").click()
    confirm(tab, "Grant")
    says(tab, "The top-up of 100 USD is granted.")
    tab.get_by_label("Tell us at, USD").fill("20")
    tab.get_by_label("Ask for a top-up at, USD").fill("10")
    tab.get_by_label("of, USD").fill("100")
    tab.get_by_role("button", name="Save").click()
    says(tab, "The settings are in force.")
    assert tab.get_by_label("Tell us at, USD").input_value() == "20"


def test_a_period_is_priced_anew_as_the_dry_run_showed(visit: Visit) -> None:
    month = datetime.now(UTC).replace(day=1)
    tab = visit("little", "owner", RERATINGS)
    tab.get_by_label("From, UTC").fill(f"{month:%Y-%m-%d}")
    tab.get_by_role("button", name="Show what would change").click()
    line = tab.get_by_role("table", name="What would change").get_by_role("row").nth(1)
    line.wait_for()
    booked, anew = line.locator("td.num").nth(2), line.locator("td.num").nth(3)
    assert booked.inner_text() > anew.inner_text(), "by the book it costs less"
    tab.get_by_role("button", name="Apply what is shown").click()
    confirm(tab, "Apply what is shown")
    says(tab, "requests are priced anew.")
    assert "applied" in tab.get_by_role("table", name="Re-ratings").inner_text()
    tab.get_by_role("button", name="Show what would change").click()
    tab.get_by_text("Nothing would change").wait_for()


def test_hundreds_of_invoices_are_paged_and_read_as_csv(
    visit: Visit, console: ConsoleServer, sessions: Sessions
) -> None:
    tab = visit("much", "reader", INVOICES)
    assert tab.get_by_role("row").count() == 51
    tab.get_by_role("link", name="Next 50").click()
    tab.get_by_role("link", name="First page").wait_for()
    newest = tab.get_by_role("row").nth(1).inner_text()
    assert f"TG-{10_000 + MANY - 50:06}" in newest
    tab.go_back()
    tab.get_by_role("link", name=f"TG-{10_000 + MANY - 1:06}").wait_for()
    with httpx.Client(base_url=console.url, cookies=sessions("much", "reader")) as client:
        file = client.get(INVOICES + "?format=csv&state=paid").content.decode("utf-8-sig")
        lines = list(csv.DictReader(io.StringIO(file)))
        assert len(lines) == 50 and {each["State"] for each in lines} == {"paid"}
        assert lines[0]["Total"] == "0.30" and lines[0]["Usage"] == "0.3"
        shown = client.get(invoice_addresses(console.much)[1] + "?format=csv").content.decode()
    assert "<script>" in shown, "a file has the name as it is"
    invoice = visit("much", "reader", invoice_addresses(console.much)[1])
    assert HOSTILE[:40] in invoice.get_by_role("row").nth(1).inner_text()


def test_an_invoice_is_read_as_pdf_by_its_own_people(
    console: ConsoleServer, sessions: Sessions
) -> None:
    late = invoice_addresses(console.much)[1]
    with httpx.Client(base_url=console.url, cookies=sessions("much", "reader")) as client:
        pdf = client.get(late + "/export?as=pdf")
        assert pdf.status_code == 200 and pdf.content.startswith(b"%PDF")
        assert pdf.headers["content-disposition"].startswith("inline")
        assert client.get(late + "/export?as=csv").text.count("\n") == 3
        assert client.get(late + "/export?as=nonsense").status_code == 400
        strange = invoice_addresses(console.little)[1]
        assert client.get(strange).status_code == 404
        assert client.get(strange + "/export").status_code == 404
        assert client.get(strange + f"?org_id={console.little.id}").status_code == 403
        draft = invoice_addresses(console.much)[0]
        assert client.get(draft + "/export").status_code == 409
    with httpx.Client(base_url=console.url, cookies=sessions("little", "owner")) as client:
        assert client.get(late + f"?org_id={console.much.id}").status_code == 200


FORMS = (
    "/console/billing/invoices/{invoice}/finalize",
    "/console/billing/invoices/{invoice}/payments",
    "/console/billing/invoices/{invoice}/void",
    "/console/billing/credits/settings",
    "/console/billing/credits/give",
    "/console/billing/credits/credit_1/revoke",
    "/console/billing/credits/top-ups/topup_1/grant",
    "/console/billing/credits/top-ups/topup_1/fail",
    "/console/billing/prices/compare",
    "/console/billing/prices/apply",
    "/console/billing/reratings/apply",
)


@pytest.mark.parametrize("role", ["reader", "developer"])
def test_a_viewer_sees_no_form_and_none_is_taken_from_them(
    console: ConsoleServer, sessions: Sessions, role: str
) -> None:
    invoice = invoice_addresses(console.much)[1].rpartition("/")[2]
    pages = (INVOICES, CREDITS, PRICES, RERATINGS, *invoice_addresses(console.much))
    with httpx.Client(base_url=console.url, cookies=sessions("much", role)) as client:
        for address in pages:
            main = client.get(address).text.partition("<main")[2]
            assert main and 'method="post"' not in main, address
        token = client.get(INVOICES).text.partition('name="form-token" content="')[2][:400]
        form = {"form_token": token.partition('"')[0], "amount": "0.30", "reference": "x"}
        for address in FORMS:
            refused = client.post(address.format(invoice=invoice), data=form)
            assert refused.status_code == 403, address
            assert "Your role does not allow this." in refused.text, address
    query = "SELECT 1 FROM invoice_payments WHERE reference = 'x'"
    assert console.call(lambda: rows(console, query)) == []


def test_the_owner_of_a_customer_chooses_but_takes_no_payment(
    console: ConsoleServer, sessions: Sessions
) -> None:
    with httpx.Client(base_url=console.url, cookies=sessions("much", "owner")) as client:
        shown = client.get(CREDITS).text.partition("<main")[2]
        assert "/credits/settings" in shown
        assert "/give" not in shown and "Take back" not in shown and "Grant" not in shown
        assert "Record the payment" not in client.get(invoice_addresses(console.much)[1]).text
        assert 'method="post"' not in client.get(PRICES).text.partition("<main")[2]
