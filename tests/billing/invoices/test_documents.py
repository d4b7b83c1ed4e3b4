"""What others read of an invoice adds up there, too: a real beancount, a spreadsheet, FOCUS."""

from __future__ import annotations

import csv
import io
from datetime import datetime
from decimal import Decimal

import msgspec
import pytest
from beancount import loader

from billing.currency import round_half_up
from billing.invoices.collection import CreditNote, Payment
from billing.invoices.documents.document import Document
from billing.invoices.documents.focus import COLUMNS, focus_as_csv, focus_rows
from billing.invoices.documents.journal import entries, to_beancount, to_hledger
from billing.invoices.documents.paper import to_pdf
from billing.invoices.documents.tables import HEAD, lines_as_csv
from billing.invoices.invoice import Invoice, Line
from billing.invoices.states import Amounts

from .billed import NOVEMBER, OCTOBER, at

CENT = 10**10
EURO_CENT = 10_845_000_000
SEPTEMBER = at(2026, 9, 1)
ID = "inv_org_a_20260901T0000"


def a_line(position: int, exact: int, coin: int, **fields: object) -> Line:
    amount, residual = round_half_up(exact, coin)
    line = Line(
        id=f"{ID}.{position:06}",
        position=position,
        kind="usage",
        usage_start=SEPTEMBER,
        usage_end=OCTOBER,
        project="proj_a",
        model="penny",
        tier="default",
        component="output",
        price_id="p:7",
        pico_per_token=7,
        quantity=exact // 7,
        num_requests=3,
        exact_pico=exact,
        amount_coins=amount,
        residual_pico=residual,
    )
    return msgspec.structs.replace(line, **fields)


def a_document(currency: str = "USD", coin: int = CENT, number: int = 1) -> Document:
    """With a model of an awkward name, a correction that gives back, an adjustment, a credit note
    and a payment."""
    corrected = {"kind": "correction", "component": "reversed", "price_id": "", "quantity": 0}
    lines = [
        a_line(1, 7 * CENT + 7, coin),
        a_line(2, 123 * CENT + 5, coin, model="=org/name:ft-1 é", project="p2"),
        a_line(3, -2 * CENT - 3, coin, pico_per_token=None, **corrected),
        a_line(4, 5 * CENT + 1, coin, kind="adjustment", quantity=0, model="", project=""),
    ]
    exact = sum(line.exact_pico for line in lines)
    total = sum(line.amount_coins or 0 for line in lines)
    invoice = Invoice(
        id=ID,
        org_id="org_a",
        account_version=1,
        currency=currency,
        issuer="TG",
        state="finalized",
        state_since=OCTOBER,
        period_start=SEPTEMBER,
        period_end=OCTOBER,
        created_at=OCTOBER,
        since=0,
        cutoff=9,
        exact_pico=exact,
        coin_pico=coin,
        rate_from=SEPTEMBER,
        total_coins=total,
        residual_pico=exact - total * coin,
        sequence=number,
        number=f"TG-{number:06}",
        finalized_at=OCTOBER,
        due_at=NOVEMBER,
    )
    taken = CreditNote(
        id="cn_1",
        invoice_id=ID,
        number=f"TG-CN-{number:06}",
        reason="slow",
        total_coins=2,
        lines={lines[0].id: 2},
        created_at=at(2026, 10, 5),
    )
    paid = Payment(
        id=f"pay_{number}",
        invoice_id=ID,
        method="received",
        reference="wire",
        amount_coins=30,
        created_at=at(2026, 10, 9),
    )
    amounts = Amounts(total=total, credited=2, settled=30)
    return Document(invoice=invoice, lines=lines, amounts=amounts, notes=[taken], payments=[paid])


DOCUMENTS = [a_document(), a_document("EUR", EURO_CENT, 2)]


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_every_entry_of_the_journal_is_nothing_in_sum() -> None:
    found = entries(DOCUMENTS)
    assert len(found) == 6 and found == sorted(found, key=lambda entry: (entry.on, entry.number))
    assert all(sum(amount for _, amount in entry.postings) == 0 for entry in found)


def test_beancount_accepts_the_journal_and_has_the_customer_owe_what_we_have() -> None:
    loaded, errors, _ = loader.load_string(to_beancount(DOCUMENTS))
    assert errors == []
    owed, accounts = Decimal(0), set()
    for entry in loaded:
        for posting in getattr(entry, "postings", ()):
            accounts.add(posting.account)
            if posting.account.startswith("Assets:Receivable:"):
                owed += posting.units.number
    expected = sum(each.amounts.due * each.coin_pico for each in DOCUMENTS)
    assert owed * 10**12 == expected
    assert len({name for entry in entries(DOCUMENTS) for name, _ in entry.postings}) == len(
        accounts
    )


def test_beancount_would_see_that_an_entry_does_not_balance() -> None:
    broken = to_beancount(DOCUMENTS).replace("Expenses:Rounding  ", "Expenses:Rounding  1", 1)
    assert loader.load_string(broken)[1] != []


def test_hledger_gets_one_account_and_one_amount_on_a_line() -> None:
    text = to_hledger(DOCUMENTS)
    postings = [line.strip().split("  ") for line in text.splitlines() if line.startswith("    ")]
    assert all(len(parts) == 2 and parts[1].startswith("USD ") for parts in postings)
    assert sum(Decimal(amount.removeprefix("USD ")) for _, amount in postings) == 0


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_table_has_every_line_and_runs_no_formula(document: Document) -> None:
    rows = table(lines_as_csv(document))
    assert list(rows[0]) == list(HEAD) and len(rows) == len(document.lines)
    assert sum(Decimal(row["amount"]) for row in rows) == Decimal(
        document.money(document.amounts.total)
    )
    assert rows[1]["model"] == "'=org/name:ft-1 é"


MANDATORY = {
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency"),
    *("BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass"),
    *("ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart", "ContractedCost"),
    *("EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit"),
    *("ProviderName", "PublisherName", "ServiceCategory", "ServiceName"),
}
"""Of FOCUS 1.2."""
MAY_BE_NULL = {"ChargeClass", "PricingQuantity", "PricingUnit", "BillingAccountName"}
NUMBERS = [name for name in COLUMNS if name.endswith(("Cost", "UnitPrice", "Quantity"))]
MOMENTS = [name for name in COLUMNS if name.endswith(("PeriodStart", "PeriodEnd"))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_focus_has_its_columns_and_they_what_belongs_there(document: Document) -> None:
    assert len(COLUMNS) == 57 and list(COLUMNS) == sorted(COLUMNS) and set(COLUMNS) >= MANDATORY
    rows = focus_rows(document)
    for row in rows:
        assert {name for name in MANDATORY if row[name] is None} <= MAY_BE_NULL
        assert row["ChargeCategory"] in ("Usage", "Adjustment")
        assert row["ChargeClass"] in (None, "Correction")
        assert row["ServiceCategory"] == "AI and Machine Learning"
        for name in NUMBERS:
            assert row[name] is None or Decimal(str(row[name])).is_finite()
        for name in MOMENTS:
            assert datetime.strptime(str(row[name]), "%Y-%m-%dT%H:%M:%SZ")
        usage = row["ChargeCategory"] == "Usage" and row["ChargeClass"] is None
        assert (row["PricingQuantity"] is not None) == (row["PricingUnit"] is not None) == usage
        assert (row["PricingCategory"] is not None) == usage
    assert sum(Decimal(str(row["BilledCost"])) for row in rows) == Decimal(
        document.money(document.amounts.total)
    )
    in_usd = sum(Decimal(str(row["PricingCurrencyEffectiveCost"])) for row in rows)
    assert in_usd * 10**12 == document.invoice.exact_pico
    assert list(table(focus_as_csv(document))[0]) == list(COLUMNS)


def test_paper_is_the_same_bytes_and_as_many_pages_as_it_takes() -> None:
    document = a_document()
    made = to_pdf(document)
    assert made == to_pdf(a_document()) and made.startswith(b"%PDF-")
    assert b"TG-000001, page 1 of 1" in made and b"\\351" in made or "é".encode("cp1252") in made
    long = msgspec.structs.replace(document, lines=[a_line(n, 7, CENT) for n in range(1, 201)])
    assert b"page 4 of 4" in to_pdf(long)
