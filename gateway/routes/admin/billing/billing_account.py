"""How an org is billed, what currencies are worth, and what follows an invoice: payments and credit
notes. Only an operator may say so: nobody says of their own invoice that it was paid.

Each change and its entry stand in one transaction, in the logs of the org that it is about and of
the operator's.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from litestar import Response, get, post
from litestar.params import FromPath
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
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.admin.billing.invoices import viewed
from gateway.routes.admin.billing.spend_caps import in_org
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery, keyset, to_listing
from gateway.routes.shared.problem import MEDIA_TYPE, Problem
from gateway.routes.shared.resource import check_id
from gateway.tenancy.money.suspension import tell_workers
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
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.page_query import OrgQuery
from gateway.wire.shared.refusals import decode_kept

SCOPE = "operator:orgs"
TAGS = ["Invoices"]
INVOICE = "/v1/admin/invoices/{invoice_id:str}"
REFUSED = {409: {MEDIA_TYPE: Problem}}
_terms = msgspec.json.Decoder(NewTerms)
_rate = msgspec.json.Decoder(NewRate)
_payment = msgspec.json.Decoder(NewPayment)
_note = msgspec.json.Decoder(NewCreditNote)


class RatesQuery(PageQuery):
    """`at`: those that are in force then; by default now."""

    at: Moment | None = None


async def noted(
    conn: AsyncConnection,
    request: AuthenticatedRequest,
    org_id: str,
    action: str,
    target: str,
    after: Any,
) -> None:
    """Record the change in both logs: the org's and the operator's."""
    await record_for_both(
        conn,
        org_id=org_id,
        operator_org=request.user.org_id,
        actor=actor_of(request),
        action=action,
        target=target,
        after={"organization": org_id, "is": after},
    )


@post(
    "/v1/admin/billing-account",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Say how an organization is billed, from its next period on",
    operation_class=describes(
        query=OrgQuery, body=NewTerms, answer=AccountView, status=201, idempotent=True
    ),
)
async def set_terms(request: AuthenticatedRequest) -> Response[bytes]:
    wanted, (org_id, _) = decode_kept(_terms, await plain_body(request)), in_org(request)
    async with services(request).system_db.begin() as conn:
        await get_org(conn, org_id)
        terms = BillingTerms(**msgspec.structs.asdict(wanted))
        view = to_account_view(await set_account(conn, org_id=org_id, terms=terms))
        await noted(conn, request, org_id, "billing_account.updated", org_id, view)
    return answer(request, view, status=201)


@get(
    "/v1/admin/billing-account",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="How an organization is billed",
    operation_class=describes(
        query=OrgQuery, answer=AccountView, said={404: {MEDIA_TYPE: Problem}}
    ),
)
async def terms_of(request: AuthenticatedRequest) -> Response[bytes]:
    org_id, _ = in_org(request)
    async with services(request).system_db.connect() as conn:
        found = await account_of(conn, org_id)
    if found is None:
        raise NoInvoice("org_id", "no billing account")
    return answer(request, to_account_view(found))


@post(
    "/v1/admin/fx-rates",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Say what a currency is worth, from a moment on",
    operation_class=describes(
        body=NewRate, answer=RateView, status=201, idempotent=True, said=REFUSED
    ),
)
async def new_rate(request: AuthenticatedRequest) -> Response[bytes]:
    wanted = decode_kept(_rate, await plain_body(request))
    async with services(request).system_db.begin() as conn:
        made = await add_rate(
            conn,
            currency=wanted.currency,
            usd_per_unit=wanted.usd_per_unit,
            valid_from=to_moment(wanted.valid_from),
            source=wanted.source,
            is_confirmed=wanted.confirm,
        )
        view = to_rate_view(made)
        own = request.user.org_id
        await noted(conn, request, own, "fx_rate.created", made.currency, view)
    return answer(request, view, status=201)


@get(
    "/v1/admin/fx-rates",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="What each currency is worth, by the rates in force",
    operation_class=describes(query=RatesQuery, answer=Listing[RateView]),
)
async def rates(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, RatesQuery)
    moment = datetime.now(UTC) if query.at is None else to_moment(query.at)
    async with services(request).system_db.connect() as conn:
        found = rates_at(moment)
        rows = await conn.execute(keyset(found, found.selected_columns.id, query))
        views = [to_rate_view(to_rate(row)) for row in rows]
    return answer(request, to_listing(views, query))


@post(
    INVOICE + "/finalize",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Make a draft final at once, as it counts by now",
    operation_class=describes(query=OrgQuery, answer=InvoiceView, idempotent=True),
)
async def make_final(request: AuthenticatedRequest, invoice_id: FromPath[str]) -> Response[bytes]:
    (org_id, _), found = in_org(request), services(request)
    check_id("invoice_id", invoice_id)

    async def told(conn: AsyncConnection, final: Invoice) -> None:
        view = await viewed(conn, final)
        await noted(conn, request, org_id, "invoice.finalized", final.id, view)

    final = await finalize(
        found.system_db, org_id=org_id, invoice_id=invoice_id, now=datetime.now(UTC), told=told
    )
    async with found.system_db.connect() as conn:
        view = await viewed(conn, final)
    return answer(request, view)


@post(
    INVOICE + "/payments",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Record that an invoice, or a part of it, was paid",
    operation_class=describes(
        query=OrgQuery, body=NewPayment, answer=PaymentView, status=201, idempotent=True
    ),
)
async def new_payment(request: AuthenticatedRequest, invoice_id: FromPath[str]) -> Response[bytes]:
    wanted, (org_id, _) = decode_kept(_payment, await plain_body(request)), in_org(request)
    check_id("invoice_id", invoice_id)
    async with services(request).system_db.begin() as conn:
        found = await get_invoice(conn, org_id=org_id, invoice_id=invoice_id)
        made = await record_payment(
            conn,
            org_id=org_id,
            invoice_id=invoice_id,
            payment_id=f"payment_{uuid7().hex}",
            amount_coins=coins_of("amount", wanted.amount, found.currency),
            reference=wanted.reference,
            now=datetime.now(UTC),
        )
        view = to_payment_view(made, found.currency)
        await noted(conn, request, org_id, "payment.created", made.id, view)
    if found.state in SUSPENDING:
        await tell_workers(services(request).redis)
    return answer(request, view, status=201)


@post(
    INVOICE + "/credit-notes",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Take back an invoice, or parts of its lines",
    operation_class=describes(
        query=OrgQuery, body=NewCreditNote, answer=CreditNoteView, status=201, idempotent=True
    ),
)
async def new_credit_note(
    request: AuthenticatedRequest, invoice_id: FromPath[str]
) -> Response[bytes]:
    wanted, (org_id, _) = decode_kept(_note, await plain_body(request)), in_org(request)
    check_id("invoice_id", invoice_id)
    async with services(request).system_db.begin() as conn:
        found = await get_invoice(conn, org_id=org_id, invoice_id=invoice_id)
        taken = None
        if wanted.lines is not None:
            taken = {
                line: coins_of("lines", amount, found.currency)
                for line, amount in wanted.lines.items()
            }
        made = await issue_credit_note(
            conn,
            org_id=org_id,
            invoice_id=invoice_id,
            note_id=f"cn_{uuid7().hex}",
            reason=wanted.reason,
            lines=taken,
            now=datetime.now(UTC),
        )
        view = to_note_view(made, found.currency)
        await noted(conn, request, org_id, "credit_note.created", made.id, view)
    if found.state in SUSPENDING:
        await tell_workers(services(request).redis)
    return answer(request, view, status=201)


def coins_of(field: str, amount: str, currency: str) -> int:
    """Raises: BadInvoicing."""
    try:
        return to_coins(amount, currency)
    except MoneyError:
        raise BadInvoicing(field, "must have no more places than the currency has") from None


routes = [set_terms, terms_of, new_rate, rates, make_final, new_payment, new_credit_note]
