"""Shows /console/billing: the invoices of an organization and what the month will have cost; and of
one invoice its lines, payments and credit notes, with its documents. Operators make drafts final,
record payments and take invoices back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, get_args

import msgspec
import sqlalchemy as sa
from litestar import Response

from billing.currency import format_coins
from billing.invoices.collection import SettlementEntry, entries_query
from billing.invoices.invoice import (
    Invoice,
    InvoiceLine,
    amounts_query,
    lines_of,
    open_invoices_query,
    to_amounts,
    to_invoice,
    to_line,
    with_amounts,
)
from billing.invoices.states import DRAFT, OPEN, PAID, Amounts, State
from billing.invoices.tables import invoice_lines
from billing.invoices.tables import invoices as invoice_table
from billing.pricing.drafts import format_price
from billing.queries import ask_all
from billing.reports.forecast import forecast_query
from gateway.console.pages import guard_console
from gateway.console.tables import Table, TableColumn
from gateway.routes.admin.billing.billing_account import finalize_invoice, take_back, take_payment
from gateway.routes.admin.billing.invoice_exports import DOCUMENTS, TABLES, exported
from gateway.routes.console.billing.parts import OPERATOR, orgs_query, read_form, shared
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.tenancy.pages import page_query
from gateway.tenancy.projects import with_project_names
from gateway.wire.admin.billing.billing_account import NewCreditNote, NewPayment

page = ConsolePage(name="billing", title="Billing", letter="b", in_any_org=True)
STATES = get_args(State)
TONES: dict[str, str] = {DRAFT: "plain", PAID: "ok", "voided": "plain", "finalized": "wait"}
"""All others wait for money that is late."""
FORMATS = {"pdf": "PDF", "csv": "CSV", "tags": "CSV by tag", "focus": "FOCUS", "parquet": "Parquet"}


class InvoiceRow(msgspec.Struct, frozen=True, kw_only=True):
    """An invoice with its amounts; None of a draft."""

    invoice: Invoice
    amounts: Amounts | None

    @property
    def id(self) -> str:
        return self.invoice.id

    @property
    def name(self) -> str:
        return self.invoice.number or f"Draft, {self.invoice.period_start:%B %Y}"

    @property
    def state(self) -> tuple[str, str]:
        state = self.invoice.state
        words = state.replace("_", " ")
        return words, TONES.get(state, "err")

    @property
    def due_coins(self) -> int:
        return 0 if self.amounts is None or self.invoice.state not in OPEN else self.amounts.due

    def coins(self, amount: int | None) -> str | None:
        return None if amount is None else format_coins(amount, self.invoice.currency)

    @property
    def total(self) -> str | None:
        return self.coins(self.invoice.total_coins)

    @property
    def due(self) -> str | None:
        return None if self.amounts is None else self.coins(self.due_coins)

    def is_late(self, now: datetime) -> bool:
        due_at = self.invoice.due_at
        return self.due_coins > 0 and due_at is not None and due_at <= now


def to_row(row: sa.Row[Any]) -> InvoiceRow:
    return InvoiceRow(invoice=to_invoice(row), amounts=to_amounts(row))


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    state = request.value("state", STATES) or None
    async with request.system_db.connect() as conn:
        listed = with_amounts(request.org_id, state=state)  # type: ignore[arg-type]
        (rows, more), due, month, orgs = await ask_all(
            conn,
            page_query(listed, invoice_table.c.id, request.cursor(), to_row),
            open_invoices_query(request.org_id, request.now),
            forecast_query(request.org_id, request.now),
            orgs_query(request),
        )
    table = Table(
        "Invoices",
        rows,
        TableColumn("Invoice", "name", link=lambda row: address_of(request, row.id)),
        TableColumn("State", "state", kind="tag"),
        TableColumn("From", lambda row: f"{row.invoice.period_start:%Y-%m-%d}"),
        TableColumn("Until", lambda row: f"{row.invoice.period_end:%Y-%m-%d}"),
        TableColumn("Usage", lambda row: row.invoice.exact_pico, kind="usd", hint="In US dollars"),
        TableColumn("Total", "total", kind="figure"),
        TableColumn("Left to pay", "due", kind="figure"),
        TableColumn("Currency", lambda row: row.invoice.currency),
        TableColumn("Due", lambda row: row.invoice.due_at, kind="time"),
    )
    return request.render(
        "billing/invoices",
        table=table,
        more=rows[-1].id if more else None,
        **shared(request, orgs),
        month=month,
        due=[(each, format_coins(each.due_coins, each.currency)) for each in due],
        states=[(each, each.replace("_", " ")) for each in STATES],
    )


def address_of(request: ConsoleRequest, invoice_id: str) -> str:
    return request.address(f"{page.path}/invoices/{invoice_id}")


class LineRow(msgspec.Struct, frozen=True, kw_only=True):
    line: InvoiceLine
    project_name: str | None
    currency: str

    @property
    def amount(self) -> str | None:
        coins = self.line.amount_coins
        return None if coins is None else format_coins(coins, self.currency)

    @property
    def price(self) -> str | None:
        pico, component = self.line.pico_per_token, self.line.component
        return None if pico is None else format_price(component, pico)


ENTRIES = {"received": "Payment", "balance": "Paid from credit", "credit_note": "Credit note"}


def to_entries(row: InvoiceRow, entries: Sequence[SettlementEntry]) -> Table:
    return Table(
        f"Payments and credit notes of {row.name}",
        entries,
        TableColumn("When", "created_at", kind="time"),
        TableColumn("What", lambda each: ENTRIES[each.kind]),
        TableColumn("Reference", "words"),
        TableColumn("Amount", lambda each: row.coins(each.amount_coins), kind="figure"),
    )


@page.get("/invoices/{invoice_id:str}")
async def show_invoice(request: ConsoleRequest) -> Response[bytes]:
    where = {"org_id": request.org_id, "invoice_id": request.ids["invoice_id"]}
    async with request.system_db.connect() as conn:
        (invoice, amounts), (found, more), entries = await ask_all(
            conn,
            amounts_query(**where),
            page_query(
                with_project_names(lines_of(**where), invoice_lines.c.project, request.org_id),
                invoice_lines.c.id,
                request.cursor("asc"),
                lambda row: (to_line(row), row.project_name),
            ),
            entries_query(**where),
        )
    row = InvoiceRow(invoice=invoice, amounts=amounts)
    currency = row.invoice.currency
    lines = [
        LineRow(line=line, project_name=project_name, currency=currency)
        for line, project_name in found
    ]
    table = Table(
        f"Lines of {row.name}",
        lines,
        TableColumn("Model", lambda each: each.line.model or each.line.kind),
        TableColumn("What", lambda each: each.line.component.replace("_", " ")),
        TableColumn("Tier", lambda each: each.line.tier),
        TableColumn("Project", lambda each: each.project_name or each.line.project),
        TableColumn("Quantity", lambda each: each.line.quantity, kind="count"),
        TableColumn("Requests", lambda each: each.line.num_requests, kind="count"),
        TableColumn("Unit price", "price", kind="figure", hint="USD a million tokens, or a call"),
        TableColumn("Exact", lambda each: each.line.exact_pico, kind="usd", hint="In US dollars"),
        TableColumn(f"Amount, {currency}", "amount", kind="figure"),
        TableColumn("Kind", lambda each: each.line.kind),
    )
    return request.render(
        "billing/invoice",
        table=table,
        more=lines[-1].line.id if more else None,
        row=row,
        tables={"entries": to_entries(row, entries)},
        formats=FORMATS,
        can_take_back=row.amounts is not None and row.amounts.credited < row.amounts.total,
    )


@page.get("/invoices/{invoice_id:str}/export")
async def export(request: ConsoleRequest) -> Response[Any]:
    format_ = request.value("as", [*DOCUMENTS, *TABLES]) or "pdf"
    made = await exported(
        request.system_db,
        org_id=request.org_id,
        invoice_id=request.ids["invoice_id"],
        format=format_,  # type: ignore[arg-type]
    )
    endings = {"tags": "tags.csv", "focus": "focus.csv"}
    name = f"{request.ids['invoice_id']}.{endings.get(format_, format_)}"
    place = "inline" if format_ == "pdf" else "attachment"
    made.headers.update({**guard_console(), "content-disposition": f'{place}; filename="{name}"'})
    return made


@page.post("/invoices/{invoice_id:str}/finalize", needs=OPERATOR, again=show_invoice)
async def finalize(request: ConsoleRequest) -> Response[bytes]:
    final = await finalize_invoice(request, request.ids["invoice_id"])
    return request.done(
        f"The invoice {final.number} is final and due.", to=address_of(request, final.id)
    )


@page.post("/invoices/{invoice_id:str}/payments", needs=OPERATOR, again=show_invoice)
async def pay(request: ConsoleRequest) -> Response[bytes]:
    form = request.form
    wanted = read_form(
        NewPayment,
        {"amount": form.get("amount", "").strip(), "reference": form.get("reference", "").strip()},
    )
    invoice_id = request.ids["invoice_id"]
    made = await take_payment(request, invoice_id, wanted)
    return request.done(
        f"A payment of {made.amount} is recorded.", to=address_of(request, invoice_id)
    )


@page.post("/invoices/{invoice_id:str}/void", needs=OPERATOR, again=show_invoice)
async def void(request: ConsoleRequest) -> Response[bytes]:
    wanted = read_form(NewCreditNote, {"reason": request.form.get("reason", "").strip()})
    invoice_id = request.ids["invoice_id"]
    made = await take_back(request, invoice_id, wanted)
    return request.done(
        f"The credit note {made.number} took back {made.total}.",
        to=address_of(request, invoice_id),
    )


routes = page.routes
