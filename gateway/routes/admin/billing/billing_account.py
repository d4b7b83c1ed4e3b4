"""How an org is billed, what currencies are worth, and what follows an invoice: payments and credit
notes. Only an operator may say so: nobody says of their own invoice that it was paid.

Each change and its entry stand in one transaction, in the logs of the org that it is about and of
the operator's.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from msgspec.structs import asdict
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.currency import to_coins
from billing.errors import BadInvoicing, MoneyError, NoInvoice
from billing.invoices.accounts import (
    BillingTerms,
    account_of,
    add_rate,
    rates_at,
    set_account,
    to_rate,
)
from billing.invoices.closing import finalize
from billing.invoices.collection import issue_credit_note, record_payment
from billing.invoices.invoice import Invoice, get_invoice
from billing.invoices.states import SUSPENDING
from billing.tables import to_moment
from gateway.audit.log import record_for_both
from gateway.ids import uuid7
from gateway.routes.admin.billing.invoices import invoices, viewed
from gateway.routes.shared.access import needs
from gateway.routes.shared.problem import MEDIA_TYPE, Problem
from gateway.routes.shared.resource import ActingRequest, AdminRequest, AdminResource, read_rows
from gateway.tenancy.changes import announce_suspensions
from gateway.tenancy.orgs import get_org
from gateway.wire.admin.billing.billing_account import (
    AccountView,
    Moment,
    NewCreditNote,
    NewPayment,
    NewRate,
    NewTerms,
    RateView,
    to_account_view,
    to_rate_view,
)
from gateway.wire.admin.billing.invoices import (
    CreditNoteView,
    InvoiceView,
    PaymentView,
    to_note_view,
    to_payment_view,
)
from gateway.wire.shared.page_query import PageQuery


class RatesQuery(PageQuery):
    """`at`: those that are in force then; by default now."""

    at: Moment | None = None


accounts = AdminResource[AccountView](
    path="/v1/admin/billing-account",
    tag="Invoices",
    change=needs("operator:orgs"),
    view=AccountView,
    in_any_org=True,
)
fx_rates = AdminResource[RateView](
    path="/v1/admin/fx-rates", tag="Invoices", change=needs("operator:orgs"), view=RateView
)


async def noted(
    conn: AsyncConnection, request: ActingRequest, action: str, target: str, after: Any
) -> None:
    """Record the change in both logs: the org's and the operator's."""
    await record_for_both(
        conn,
        org_id=request.org_id,
        operator_org=request.user.org_id,
        actor=request.actor,
        action=action,
        target=target,
        after={"organization": request.org_id, "is": after},
    )


@accounts.create("Say how an organization is billed, from its next period on", NewTerms)
async def set_terms(request: AdminRequest, wanted: NewTerms) -> AccountView:
    org_id = request.org_id
    async with request.system_db.begin() as conn:
        await get_org(conn, org_id)
        terms = BillingTerms(**asdict(wanted))
        view = to_account_view(await set_account(conn, org_id=org_id, terms=terms))
        await noted(conn, request, "billing_account.updated", org_id, view)
    return view


@accounts.get("How an organization is billed", said={404: {MEDIA_TYPE: Problem}})
async def terms_of(request: AdminRequest) -> AccountView:
    async with request.system_db.connect() as conn:
        found = await account_of(conn, request.org_id)
    if found is None:
        raise NoInvoice("org_id", "no billing account")
    return to_account_view(found)


@fx_rates.create(
    "Say what a currency is worth, from a moment on",
    NewRate,
    said={409: {MEDIA_TYPE: Problem}},
)
async def new_rate(request: AdminRequest, wanted: NewRate) -> RateView:
    async with request.system_db.begin() as conn:
        made = await add_rate(
            conn,
            currency=wanted.currency,
            usd_per_unit=wanted.usd_per_unit,
            valid_from=to_moment(wanted.valid_from),
            source=wanted.source,
            is_confirmed=wanted.confirm,
        )
        view = to_rate_view(made)
        await noted(conn, request, "fx_rate.created", made.currency, view)
    return view


@fx_rates.page("What each currency is worth, by the rates in force", RatesQuery)
async def rates(request: AdminRequest, query: RatesQuery) -> tuple[list[RateView], bool]:
    moment = datetime.now(UTC) if query.at is None else to_moment(query.at)
    async with request.system_db.connect() as conn:
        rows, more = await read_rows(conn, rates_at(moment), query)
    return [to_rate_view(to_rate(row)) for row in rows], more


async def finalize_invoice(request: ActingRequest, invoice_id: str) -> Invoice:
    """Make a draft final. Raises: NoInvoice, InvoicingConflict."""

    async def on_final(conn: AsyncConnection, final: Invoice) -> None:
        await noted(conn, request, "invoice.finalized", final.id, await viewed(conn, final))

    return await finalize(
        request.system_db,
        org_id=request.org_id,
        invoice_id=invoice_id,
        now=datetime.now(UTC),
        on_final=on_final,
    )


async def take_payment(request: ActingRequest, invoice_id: str, wanted: NewPayment) -> PaymentView:
    """Record a payment. Raises: NoInvoice, InvoicingConflict, BadInvoicing."""
    where: dict[str, Any] = {"org_id": request.org_id, "invoice_id": invoice_id}
    async with request.system_db.begin() as conn:
        found = await get_invoice(conn, **where)
        made = await record_payment(
            conn,
            **where,
            payment_id=f"payment_{uuid7().hex}",
            amount_coins=coins_of("amount", wanted.amount, found.currency),
            reference=wanted.reference,
            now=datetime.now(UTC),
        )
        view = to_payment_view(made, found.currency)
        await noted(conn, request, "payment.created", made.id, view)
    if found.state in SUSPENDING:
        await announce_suspensions(request.redis)
    return view


async def take_back(
    request: ActingRequest, invoice_id: str, wanted: NewCreditNote
) -> CreditNoteView:
    """Issue a credit note. Raises: NoInvoice, InvoicingConflict, BadInvoicing."""
    where: dict[str, Any] = {"org_id": request.org_id, "invoice_id": invoice_id}
    async with request.system_db.begin() as conn:
        found = await get_invoice(conn, **where)
        taken = None
        if wanted.lines is not None:
            taken = {
                line: coins_of("lines", amount, found.currency)
                for line, amount in wanted.lines.items()
            }
        made = await issue_credit_note(
            conn,
            **where,
            note_id=f"cn_{uuid7().hex}",
            reason=wanted.reason,
            lines=taken,
            now=datetime.now(UTC),
        )
        view = to_note_view(made, found.currency)
        await noted(conn, request, "credit_note.created", made.id, view)
    if found.state in SUSPENDING:
        await announce_suspensions(request.redis)
    return view


@invoices.act("/finalize", "Make a draft final at once, as it counts by now", conditional=False)
async def make_final(request: AdminRequest) -> InvoiceView:
    final = await finalize_invoice(request, request.id)
    async with request.system_db.connect() as conn:
        return await viewed(conn, final)


@invoices.act(
    "/payments",
    "Record that an invoice, or a part of it, was paid",
    body=NewPayment,
    answer=PaymentView,
    status=201,
    conditional=False,
)
async def new_payment(request: AdminRequest, wanted: NewPayment) -> PaymentView:
    return await take_payment(request, request.id, wanted)


@invoices.act(
    "/credit-notes",
    "Take back an invoice, or parts of its lines",
    body=NewCreditNote,
    answer=CreditNoteView,
    status=201,
    conditional=False,
)
async def new_credit_note(request: AdminRequest, wanted: NewCreditNote) -> CreditNoteView:
    return await take_back(request, request.id, wanted)


def coins_of(field: str, amount: str, currency: str) -> int:
    """Raises: BadInvoicing."""
    try:
        return to_coins(amount, currency)
    except MoneyError:
        raise BadInvoicing(field, "must have no more places than the currency has") from None


routes = [set_terms, terms_of, new_rate, rates, make_final, new_payment, new_credit_note]
