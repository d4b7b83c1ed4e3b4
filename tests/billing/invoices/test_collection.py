"""After an invoice is final: what is paid, what is taken back, who is reminded."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.credits.grants_admin import grant_credit
from billing.errors import BadInvoicing, InvoicingConflict, NoInvoice
from billing.invoices.balance import unapplied_pico
from billing.invoices.closing import close
from billing.invoices.collection import (
    CreditNote,
    dun,
    issue_credit_note,
    notes_of,
    payments_of,
    record_payment,
)
from billing.invoices.invoice import Invoice, get_invoice
from billing.ledger.accounts import account_of
from billing.ledger.transfers import Transfer, TransferStatus, transfer
from billing.tables import credit_burns
from tests.billing.invoices.billed import (
    NOVEMBER,
    OCTOBER,
    ORG,
    assert_books_agree,
    at,
    book,
    close_and_finalize,
    lines,
    open_account,
    receivable,
    tokens,
)

CENT = 10**10
PAID_AT = at(2026, 10, 20)


async def an_invoice(db: AsyncEngine, *, cents: int = 1000, now: datetime = OCTOBER) -> Invoice:
    """Over two lines, of a quarter and the rest."""
    await open_account(db)
    quarter = cents // 4
    moment = now - timedelta(days=3)
    await book(
        db,
        tokens(moment, quarter, CENT, project="p1"),
        tokens(moment, cents - quarter, CENT, project="p2"),
    )
    return await close_and_finalize(db, now)


async def pay(db: AsyncEngine, invoice: Invoice, coins: int, payment_id: str = "pay_1") -> None:
    async with db.begin() as conn:
        await record_payment(
            conn,
            org_id=ORG,
            invoice_id=invoice.id,
            payment_id=payment_id,
            amount_coins=coins,
            reference="wire 7",
            now=PAID_AT,
        )


async def take_back(
    db: AsyncEngine, invoice: Invoice, taken: dict[str, int] | None, note_id: str = "cn_1"
) -> CreditNote:
    async with db.begin() as conn:
        return await issue_credit_note(
            conn,
            org_id=ORG,
            invoice_id=invoice.id,
            note_id=note_id,
            reason="it was slow",
            lines=taken,
            now=PAID_AT,
        )


async def burn(db: AsyncEngine, amount: int, grant: str) -> None:
    """A grant of so much, all of which has paid for usage."""
    burned = Transfer(
        id=f"burn:{grant}",
        debit=f"grant:{grant}",
        credit=account_of(ORG),
        amount_pico=amount,
        kind="burn",
    )
    row = {"transfer_id": grant, "grant_id": grant, "org_id": ORG, "event_id": grant}
    async with db.begin() as conn:
        await grant_credit(conn, credit_id=grant, org=ORG, amount_pico=amount)
    async with db.begin() as conn:
        assert await transfer(conn, [burned]) == [TransferStatus.CREATED]
        await conn.execute(sa.insert(credit_burns).values(**row, version=1, amount_pico=amount))


async def state(db: AsyncEngine, invoice: Invoice) -> str:
    async with db.connect() as conn:
        return (await get_invoice(conn, org_id=ORG, invoice_id=invoice.id)).state


async def test_an_invoice_is_paid_when_all_of_it_is(db: AsyncEngine) -> None:
    invoice = await an_invoice(db)
    await pay(db, invoice, 400)
    assert await state(db, invoice) == "finalized"
    for too_much in (601, 0, -1):
        with pytest.raises(BadInvoicing):
            await pay(db, invoice, too_much, "pay_2")
    await pay(db, invoice, 600, "pay_2")
    assert (await state(db, invoice), await receivable(db)) == ("paid", 0)
    with pytest.raises(BadInvoicing):
        await pay(db, invoice, 1, "pay_3")
    async with db.connect() as conn:
        found = await payments_of(conn, org_id=ORG, invoice_id=invoice.id)
    assert [(it.amount_coins, it.reference) for it in found] == [(400, "wire 7"), (600, "wire 7")]
    await assert_books_agree(db)


async def test_who_pays_at_the_same_moment_pays_once(db: AsyncEngine) -> None:
    invoice = await an_invoice(db)
    done = await asyncio.gather(
        *(pay(db, invoice, 600, f"pay_{number}") for number in range(4)), return_exceptions=True
    )
    assert sorted(type(each).__name__ for each in done) == ["BadInvoicing"] * 3 + ["NoneType"]
    assert await receivable(db) == 400 * CENT
    await assert_books_agree(db)


async def test_a_payment_is_booked_once_of_one_id(db: AsyncEngine) -> None:
    invoice = await an_invoice(db)
    await pay(db, invoice, 400)
    with pytest.raises(DBAPIError):
        await pay(db, invoice, 400)
    await assert_books_agree(db)


async def test_a_credit_note_takes_back_no_more_than_is_left(db: AsyncEngine) -> None:
    invoice = await an_invoice(db)
    first, second = (it.id for it in await lines(db, invoice))
    with pytest.raises(BadInvoicing, match="left"):
        await take_back(db, invoice, {first: 251})
    with pytest.raises(BadInvoicing, match="no such line"):
        await take_back(db, invoice, {"another": 1})
    note = await take_back(db, invoice, {first: 200})
    assert (note.number, note.total_coins) == ("TG-CN-000001", 200)
    with pytest.raises(BadInvoicing):
        await take_back(db, invoice, {first: 51}, "cn_2")
    with pytest.raises(BadInvoicing):
        await pay(db, invoice, 801)
    await take_back(db, invoice, {first: 50, second: 1}, "cn_2")
    rest = await take_back(db, invoice, None, "cn_3")
    assert (rest.number, rest.lines) == ("TG-CN-000003", {second: 749})
    assert (await state(db, invoice), await receivable(db)) == ("voided", 0)
    with pytest.raises(InvoicingConflict):
        await take_back(db, invoice, None, "cn_4")
    async with db.connect() as conn:
        found = await notes_of(conn, org_id=ORG, invoice_id=invoice.id)
    assert [it.lines for it in found] == [{first: 200}, {first: 50, second: 1}, {second: 749}]
    await assert_books_agree(db)


async def test_what_is_taken_back_of_a_paid_invoice_pays_the_next(db: AsyncEngine) -> None:
    invoice = await an_invoice(db)
    await pay(db, invoice, 1000)
    [first, _] = await lines(db, invoice)
    await take_back(db, invoice, {first.id: 100})
    assert (await state(db, invoice), await receivable(db)) == ("paid", -100 * CENT)
    async with db.connect() as conn:
        assert await unapplied_pico(conn, ORG) == 100 * CENT
    following = await an_invoice(db, cents=60, now=NOVEMBER)
    assert (following.state, await receivable(db)) == ("paid", -40 * CENT)
    await assert_books_agree(db)


async def test_what_credits_have_paid_settles_an_invoice(db: AsyncEngine) -> None:
    await open_account(db)
    await burn(db, 1000 * CENT, "first")
    first = await an_invoice(db)
    assert first.state == "paid"
    await burn(db, 500 * CENT, "second")
    second = await an_invoice(db, now=NOVEMBER)
    assert second.state == "finalized"
    await pay(db, second, 500)
    assert (await state(db, second), await receivable(db)) == ("paid", 0)
    await assert_books_agree(db)


async def test_who_has_paid_to_the_pico_is_not_asked_for_a_cent(db: AsyncEngine) -> None:
    await open_account(db)
    used = 16 * CENT // 10
    await book(db, tokens(at(2026, 9, 3), 1, used))
    await burn(db, used, "all")
    invoice = await close_and_finalize(db, OCTOBER)
    assert (invoice.total_coins, invoice.state) == (2, "paid")
    await assert_books_agree(db)


async def test_nothing_to_pay_is_paid(db: AsyncEngine) -> None:
    await open_account(db)
    invoice = await close_and_finalize(db, OCTOBER)
    assert (invoice.total_coins, invoice.state) == (0, "paid")
    with pytest.raises(InvoicingConflict):
        await take_back(db, invoice, None)


async def test_a_draft_is_neither_paid_nor_taken_back(db: AsyncEngine) -> None:
    await open_account(db)
    draft = await close(db, org_id=ORG, now=OCTOBER)
    assert draft is not None
    with pytest.raises(InvoicingConflict):
        await pay(db, draft, 1)
    with pytest.raises(InvoicingConflict):
        await take_back(db, draft, None)
    with pytest.raises(NoInvoice):
        async with db.begin() as conn:
            await record_payment(
                conn,
                org_id="org_b",
                invoice_id=draft.id,
                payment_id="p",
                amount_coins=1,
                reference="",
                now=OCTOBER,
            )


async def test_who_does_not_pay_is_reminded_a_stage_at_a_time(db: AsyncEngine) -> None:
    invoice = await an_invoice(db)
    due_at = at(2026, 11, 2)
    assert invoice.due_at == due_at
    assert await dun(db, due_at - timedelta(seconds=1)) == 0
    # Three processes at once, and one that was down for a year.
    late = due_at + timedelta(days=365)
    assert sum(await asyncio.gather(*(dun(db, late) for _ in range(3)))) == 1
    assert await state(db, invoice) == "past_due"
    assert await dun(db, late + timedelta(days=2)) == 0
    assert await dun(db, late + timedelta(days=3)) == 1
    await pay(db, invoice, 1000)
    assert await dun(db, late + timedelta(days=300)) == 0
    async with db.connect() as conn:
        query = sa.text("SELECT state FROM invoice_transitions ORDER BY occurred_at, id")
        found = list(await conn.scalars(query))
    assert sorted(found) == ["draft", "finalized", "paid", "past_due", "reminder_1"]
