"""Final invoices with all that documents are made of, by hand."""

from __future__ import annotations

import msgspec

from billing.currency import round_half_up
from billing.invoices.collection import CreditNote
from billing.invoices.documents.advances import Advance
from billing.invoices.documents.document import Document
from billing.invoices.invoice import Invoice, InvoiceLine, Payment
from billing.invoices.states import Amounts
from billing.tables import EPOCH
from tests.billing.invoices.billed import NOVEMBER, OCTOBER, at

CENT = 10**10
EURO_CENT = 10_845_000_000
PAID = (("received", 30), ("balance", 25), ("balance", -4))
"""Payments in kind and coins; the negative one gives back a part of an advance payment."""
LIST_PICO = {"p:8@acme": 8}
AUGUST, SEPTEMBER = at(2026, 8, 1), at(2026, 9, 1)
ID = "inv_org_a_20260901T0000"


def a_line(position: int, exact: int, coin: int, **fields: object) -> InvoiceLine:
    amount, residual = round_half_up(exact, coin)
    line = InvoiceLine(
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


def a_payment(name: str, method: str, coins: int) -> Payment:
    return Payment(
        id=name,
        invoice_id=ID,
        method=method,
        reference="",
        amount_coins=coins,
        created_at=at(2026, 10, 9),
    )


def a_document(currency: str = "USD", coin: int = CENT, number: int = 1) -> Document:
    """With an awkward name at a discount, what is priced anew, an adjustment, what came late, what
    was used before there was an account or had no price, a credit note, and who paid what."""
    before = {"usage_start": AUGUST, "usage_end": SEPTEMBER}
    unpriced = {"price_id": "", "pico_per_token": None, "quantity": 40}
    awkward = {"model": "=org/name:ft-1 é", "project": "p2", "price_id": "p:8@acme"}
    lines = [
        a_line(1, 7 * CENT + 7, coin),
        a_line(2, 126 * CENT + 7, coin, **awkward),
        a_line(3, -7 * CENT, coin, kind="correction", **before),
        a_line(4, 5 * CENT + 1, coin, kind="adjustment", quantity=3, model="", project=""),
        a_line(5, 14 * CENT, coin, kind="late", **before),
        a_line(6, 7 * CENT - 7, coin, kind="correction", **before),
        a_line(7, 70, coin, kind="late", usage_start=EPOCH, usage_end=AUGUST),
        a_line(8, 0, coin, **unpriced),
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
    paid = [a_payment(f"pay_{number}.{position}", *it) for position, it in enumerate(PAID)]
    settled = sum(coins for _, coins in PAID)
    amounts = Amounts(total=total, credited=2, settled=settled)
    return Document(
        invoice=invoice,
        org_name="=Acme",
        project_names={"proj_a": "Search"},
        lines=lines,
        amounts=amounts,
        notes=[taken],
        payments=paid,
    )


DOCUMENTS = [a_document(), a_document("EUR", EURO_CENT, 2)]


def advances() -> list[Advance]:
    """Two credits, and what went back of them."""
    parts = (("credit", 10**12), ("credit", 10**12), ("expired", 3 * CENT + 1), ("revoked", 7))
    return [
        Advance(
            id=f"over:{number}", org_id="org_a", kind=kind, amount_pico=amount, posted_at=OCTOBER
        )
        for number, (kind, amount) in enumerate(parts)
    ]
