"""The lines of an invoice as tables that others read: CSV, FOCUS, and Parquet by another reader."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import duckdb
import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.invoices.collection import issue_credit_note
from billing.invoices.documents import document
from billing.invoices.documents.document import (
    Bill,
    Document,
    LineReversal,
    Page,
    read_bill,
    read_pages,
)
from billing.invoices.documents.focus import (
    COLUMNS,
    MOMENTS,
    NUMBERS,
    Value,
    focus_rows,
    to_text,
    write_focus,
)
from billing.invoices.documents.parquet import ROW_GROUP_LINES, write_parquet
from billing.invoices.documents.tables import HEAD, write_lines
from billing.invoices.invoice import amounts_of
from billing.ledger.price_sets import sync_price_book
from billing.pricing.price_book import PriceBook
from tests.billing.invoices.billed import (
    NOVEMBER,
    OCTOBER,
    at,
    book,
    close_and_finalize,
    lines,
    open_account,
    tokens,
    used,
)
from tests.billing.invoices.documented import CENT, DOCUMENTS, LIST_PICO, a_document, a_line

Write = Callable[[Bill, Iterable[Page], IO[bytes]], None]
LONG, PAGE_LINES = 25_000, 1000


def pages_of(document: Document, size: int = 2) -> Iterable[Page]:
    for begun in range(0, len(document.lines), size):
        yield Page(lines=document.lines[begun : begun + size], list_pico=LIST_PICO)
    lines = {line.id: line for line in document.lines}
    for note in document.notes:
        yield Page(
            taken_back=[
                LineReversal(
                    note=note.number, reason=note.reason, line=lines[name], amount_coins=coins
                )
                for name, coins in note.lines.items()
            ]
        )


def asked_for(document: Document) -> Decimal:
    """And not taken back."""
    return Decimal(document.money(document.amounts.total - document.amounts.credited))


def table(write: Write, document: Document) -> list[dict[str, str]]:
    file = io.BytesIO()
    write(document, pages_of(document), file)
    return list(csv.DictReader(io.StringIO(file.getvalue().decode(), newline="")))


def rows_of(document: Document) -> list[dict[str, Value]]:
    return [row for page in pages_of(document) for row in focus_rows(document, page)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_table_has_every_line_and_runs_no_formula(document: Document) -> None:
    rows = table(write_lines, document)
    assert list(rows[0]) == list(HEAD) and len(rows) == len(document.lines)
    assert sum(Decimal(row["amount"]) for row in rows) == Decimal(
        document.money(document.amounts.total)
    )
    assert rows[1]["model"] == "'=org/name:ft-1 é"
    empty = msgspec.structs.replace(document, lines=[], notes=[])
    file = io.BytesIO()
    write_lines(empty, pages_of(empty), file)
    assert file.getvalue().decode().strip() == ",".join(HEAD)


# FOCUS 1.2, as its specification and the conformance rules beside it say.

NEVER_NULL = {
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingAccountType"),
    *("BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory"),
    *("ChargeDescription", "ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart"),
    *("ContractedCost", "EffectiveCost", "InvoiceId", "InvoiceIssuerName", "ListCost"),
    *("PricingCurrency", "PricingCurrencyEffectiveCost", "ProviderName", "PublisherName"),
    *("ServiceCategory", "ServiceName", "ServiceSubcategory"),
}
OF_USAGE = {
    *("ConsumedQuantity", "ConsumedUnit", "ContractedUnitPrice", "ListUnitPrice"),
    *("PricingCategory", "PricingCurrencyContractedUnitPrice", "PricingCurrencyListUnitPrice"),
    *("PricingQuantity", "PricingUnit", "ResourceId", "SkuId", "SkuMeter", "SkuPriceId"),
}
"""Not null where usage is charged that corrects nothing."""
ALLOWED = {
    "ChargeCategory": {"Usage", "Purchase", "Tax", "Credit", "Adjustment"},
    "ChargeClass": {None, "Correction"},
    "ChargeFrequency": {"One-Time", "Recurring", "Usage-Based"},
    "PricingCategory": {None, "Standard", "Dynamic", "Committed", "Other"},
    "ServiceCategory": {"AI and Machine Learning"},
    "ServiceSubcategory": {"Generative AI", "Machine Learning", "AI Platforms"},
    "ConsumedUnit": {None, "Tokens", "Calls"},
    "PricingUnit": {None, "Tokens", "Calls"},
}
TOGETHER = (
    ("ConsumedQuantity", "ConsumedUnit"),
    ("PricingQuantity", "PricingUnit"),
    ("SkuId", "SkuMeter"),
    ("SubAccountId", "SubAccountType"),
    ("ResourceId", "ResourceType"),
    ("CommitmentDiscountId", "CommitmentDiscountCategory"),
)
"""Null if and only if the other is."""
PRODUCTS = (
    ("ListUnitPrice", "PricingQuantity", "ListCost"),
    ("ContractedUnitPrice", "PricingQuantity", "ContractedCost"),
)


def number(row: dict[str, Value], column: str) -> Decimal:
    value = row[column]
    assert isinstance(value, Decimal)
    return value


def assert_is_as_focus_says(row: dict[str, Value]) -> None:
    assert list(row) == list(COLUMNS)
    for column, value in row.items():
        kind = Decimal if column in NUMBERS else datetime if column in MOMENTS else str
        assert value is None or isinstance(value, kind), column
        assert value != "", "what is not there is null"
    assert not {name for name in NEVER_NULL if row[name] is None}
    for column, values in ALLOWED.items():
        assert row[column] in values, column
    for one, other in TOGETHER:
        assert (row[one] is None) == (row[other] is None), one
    if row["ChargeCategory"] == "Usage" and row["ChargeClass"] is None:
        assert not {name for name in OF_USAGE if row[name] is None}
        for price, quantity, cost in PRODUCTS:
            assert number(row, price) >= 0
            assert number(row, price) * number(row, quantity) == number(row, cost), cost
    if row["ChargeCategory"] != "Usage":
        assert row["ConsumedQuantity"] is None
    assert row["ProviderName"] == row["InvoiceIssuerName"] or row["BilledCost"] == 0
    details = row["SkuPriceDetails"]
    assert details is None or all(
        isinstance(key, str) and isinstance(value, str)
        for key, value in msgspec.json.decode(str(details)).items()
    )
    assert details is None or row["SkuPriceId"] is not None
    assert datetime.fromisoformat(str(to_text(row["ChargePeriodStart"]))).tzinfo is UTC


@pytest.mark.parametrize("document", DOCUMENTS)
def test_focus_rows_are_as_its_specification_says(document: Document) -> None:
    rows = rows_of(document)
    for row in rows:
        assert_is_as_focus_says(row)
    assert len(COLUMNS) == 57 and list(COLUMNS) == sorted(COLUMNS)
    assert sum(number(row, "BilledCost") for row in rows) == asked_for(document)
    in_usd = sum(number(row, "PricingCurrencyEffectiveCost") for row in rows)
    taken_back = document.amounts.credited * document.coin_pico
    assert in_usd * 10**12 == document.invoice.exact_pico - taken_back
    of_csv = table(write_focus, document)
    assert list(of_csv[0]) == list(COLUMNS) and of_csv[0]["BillingAccountName"] == "'=Acme"
    assert [row["BilledCost"] for row in of_csv] == [to_text(row["BilledCost"]) for row in rows]


def test_focus_says_what_kind_of_charge_a_line_is() -> None:
    kinds = [(row["ChargeCategory"], row["ChargeClass"]) for row in rows_of(a_document())]
    assert kinds == [
        ("Usage", None),
        ("Usage", None),
        ("Usage", "Correction"),  # what is taken back of an earlier invoice
        ("Adjustment", None),
        ("Usage", "Correction"),  # late, for a period that was invoiced
        ("Usage", "Correction"),  # what is charged in its place
        ("Usage", None),  # before there was an account
        ("Usage", None),  # without a price
        ("Credit", "Correction"),  # what a credit note takes back
    ]
    note = rows_of(a_document())[-1]
    assert note["ChargeDescription"] == "credit note TG-CN-000001: slow"
    assert note["SubAccountName"] == "Search"


def test_focus_knows_the_price_that_everybody_pays() -> None:
    """The list cost and the contracted cost of a discounted price differ by the discount."""
    document = a_document()
    row = rows_of(document)[1]
    line = document.lines[1]
    assert (row["SkuPriceId"], row["ListUnitPrice"]) == ("p:8@acme", Decimal("0.000000000008"))
    assert row["ContractedUnitPrice"] == Decimal("0.000000000007")
    assert (
        number(row, "ListCost") - number(row, "ContractedCost") == Decimal(line.quantity) / 10**12
    )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_another_reader_finds_the_same_in_parquet(document: Document, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    with path.open("wb") as file:
        write_parquet(document, pages_of(document), file)
    read = duckdb.read_parquet(str(path))
    kinds = dict(zip(read.columns, map(str, read.types), strict=True))
    assert list(kinds) == list(COLUMNS)
    assert {kinds[name] for name in NUMBERS} == {"DECIMAL(38,18)"}
    assert {kinds[name] for name in MOMENTS} == {"TIMESTAMP WITH TIME ZONE"}
    assert {kinds[name] for name in set(COLUMNS) - NUMBERS - MOMENTS} == {"VARCHAR"}
    moments = ", ".join(f"epoch_us({name})::BIGINT AS {name}" for name in MOMENTS)
    found = read.project(f"* REPLACE ({moments})").fetchall()
    assert [tuple(map(comparable, row.values())) for row in rows_of(document)] == found
    invoiced = read.aggregate("sum(BilledCost)").fetchall()
    assert invoiced == [(asked_for(document),)]


def comparable(value: Value) -> Any:
    return int(value.timestamp() * 10**6) if isinstance(value, datetime) else value


def test_a_long_invoice_is_written_a_row_group_at_a_time(tmp_path: Path) -> None:
    """Pages are taken as they are needed, and what is written is not kept."""
    bill = a_document()
    names = (str(uuid4()) for _ in range(PAGE_LINES))
    lines = [a_line(number, 7, CENT, project=name) for number, name in enumerate(names)]
    sizes: list[int] = []

    def pages() -> Iterable[Page]:
        for _ in range(LONG // PAGE_LINES):
            sizes.append(path.stat().st_size)
            yield Page(lines=lines, list_pico={})

    path = tmp_path / "rows.parquet"
    with path.open("wb", buffering=0) as file:
        write_parquet(bill, pages(), file)
    groups = duckdb.sql(f"SELECT DISTINCT row_group_id FROM parquet_metadata('{path}')").fetchall()
    assert len(groups) == -(-LONG // ROW_GROUP_LINES)
    assert duckdb.read_parquet(str(path)).aggregate("count(*)").fetchall() == [(LONG,)]
    assert sizes[0] == 0 < sizes[-1], "the first ones are written before the last are taken"


def test_what_fails_on_the_way_is_told(tmp_path: Path) -> None:
    def pages() -> Iterable[Page]:
        yield from pages_of(a_document())
        raise OSError("the database is away")

    for write in (write_lines, write_focus, write_parquet):
        with pytest.raises(Exception, match="away"), (tmp_path / "rows").open("wb") as file:
            write(a_document(), pages(), file)


BOOK = """
[[price]]
model = "m"
valid_from = "2026-01-01"
uncached_input = "1"
output = "4"
[[discount]]
price_list = "acme"
percent = "25"
component = "output"
valid_from = "2026-02-01"
"""


async def test_pages_follow_each_other_and_say_what_everybody_pays(
    db: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "PAGE_LINES", 3)
    (tmp_path / "book.toml").write_text(BOOK)
    prices = PriceBook.load([tmp_path])
    await sync_price_book(db, prices)
    await open_account(db)
    moment = at(2026, 9, 2)
    paid = prices.at("m", moment.timestamp(), price_list="acme")
    await book(db, *(used(moment, prices=paid, model="m", project=f"p{n}") for n in range(4)))
    final = await close_and_finalize(db, OCTOBER)
    async with db.connect() as conn:
        bill = await read_bill(conn, org_id=final.org_id, invoice_id=final.id)
    pages = [page async for page in read_pages(db, bill)]
    assert [len(page.lines) for page in pages] == [3, 3, 2]
    assert not any(page.taken_back for page in pages)
    assert [line for page in pages for line in page.lines] == await lines(db, final)
    found = {
        row["SkuMeter"]: (row["ListUnitPrice"], row["ContractedUnitPrice"])
        for page in pages
        for row in focus_rows(bill, page)
    }
    assert found == {
        "output": (Decimal("0.000004"), Decimal("0.000003")),
        "uncached_input": (Decimal("0.000001"), Decimal("0.000001")),
    }


async def test_what_is_billed_over_all_months_is_the_invoices_less_their_credit_notes(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "PAGE_LINES", 2)
    await open_account(db)
    months = ((at(2026, 9, 2), OCTOBER), (at(2026, 10, 2), NOVEMBER))
    billed, asked = Decimal(0), 0
    for moment, end in months:
        await book(db, *(tokens(moment, 9, CENT + 7, project=f"p{n}") for n in range(3)))
        final = await close_and_finalize(db, end)
        ids = [line.id for line in await lines(db, final)]
        for index, taken in enumerate((dict.fromkeys(ids, 2), {ids[0]: 7}, {ids[1]: 3})):
            async with db.begin() as conn:
                note_id = f"{final.id}.{index}"
                await issue_credit_note(
                    conn,
                    org_id=final.org_id,
                    invoice_id=final.id,
                    note_id=note_id,
                    reason="slow",
                    lines=taken,
                    now=end,
                )
        async with db.connect() as conn:
            bill = await read_bill(conn, org_id=final.org_id, invoice_id=final.id)
            amounts = await amounts_of(conn, final)
        asked += amounts.total - amounts.credited
        rows = [row async for page in read_pages(db, bill) for row in focus_rows(bill, page)]
        for row in rows:
            assert_is_as_focus_says(row)
        assert len(rows) == 3 + 3 + 1 + 1
        billed += sum(number(row, "BilledCost") for row in rows)
    assert billed * 100 == asked == 2 * (3 * 9 - 3 * 2 - 7 - 3)
