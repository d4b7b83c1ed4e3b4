"""An invoice adds up where others read it, too: a real beancount, hledger's form, paper."""

from __future__ import annotations

from decimal import Decimal

import msgspec
from beancount import loader

from billing.invoices.documents.journal import (
    Entry,
    of_advance,
    of_document,
    to_beancount,
    to_hledger,
)
from billing.invoices.documents.pdf import to_pdf
from tests.billing.invoices.documented import CENT, DOCUMENTS, PAID, a_document, a_line, advances


def entries() -> list[Entry]:
    of_credits = [of_advance(each) for each in advances()]
    return [*of_credits, *(entry for each in DOCUMENTS for entry in of_document(each))]


def test_every_entry_of_the_journal_is_nothing_in_sum() -> None:
    assert len(entries()) == 2 * (1 + 1 + len(PAID)) + len(advances())
    assert all(sum(amount for _, amount in entry.postings) == 0 for entry in entries())


def test_beancount_accepts_the_journal_and_has_everybody_owe_what_we_have() -> None:
    loaded, errors, _ = loader.load_string(to_beancount(entries()))
    assert errors == []
    sums: dict[str, Decimal] = {}
    for entry in loaded:
        for posting in getattr(entry, "postings", ()):
            sums[posting.account] = sums.get(posting.account, Decimal(0)) + posting.units.number
    [owed] = [amount for name, amount in sums.items() if name.startswith("Assets:Receivable:")]
    assert owed * 10**12 == sum(each.amounts.due * each.coin_pico for each in DOCUMENTS)
    [left] = [amount for name, amount in sums.items() if name.startswith("Liabilities:Credits:")]
    applied = sum((25 - 4) * each.coin_pico for each in DOCUMENTS)
    assert -left * 10**12 == 2 * 10**12 - 3 * CENT - 1 - 7 - applied
    assert len({name for entry in entries() for name, _ in entry.postings}) == len(sums)


def test_beancount_would_see_that_an_entry_does_not_balance() -> None:
    broken = to_beancount(entries()).replace("Expenses:Rounding  ", "Expenses:Rounding  1", 1)
    assert loader.load_string(broken)[1] != []


def test_hledger_gets_one_account_and_one_amount_on_a_line() -> None:
    text = to_hledger(entries())
    postings = [line.strip().split("  ") for line in text.splitlines() if line.startswith("    ")]
    assert all(len(parts) == 2 and parts[1].startswith("USD ") for parts in postings)
    assert sum(Decimal(amount.removeprefix("USD ")) for _, amount in postings) == 0


def test_paper_is_the_same_bytes_and_as_many_pages_as_it_takes() -> None:
    document = a_document()
    made = to_pdf(document)
    assert made == to_pdf(a_document()) and made.startswith(b"%PDF-")
    assert b"TG-000001, page 1 of 1" in made and b"\\351" in made or "é".encode("cp1252") in made
    long = msgspec.structs.replace(document, lines=[a_line(n, 7, CENT) for n in range(1, 201)])
    assert b"page 4 of 4" in to_pdf(long)
