"""Shows /console/billing/reratings: periods that were priced anew. An operator sees first, line by
line beside what is booked, what another rating would change, and applies what was seen."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from litestar import Response

from billing.corrections.rerating import Rerating, ReratingPlan, reratings_of, to_rerating
from billing.queries import ask_all
from billing.tables import reratings as rerating_table
from gateway.console.tables import Table, TableColumn
from gateway.request_errors import BadField
from gateway.routes.admin.billing.prices import lists_of
from gateway.routes.admin.billing.reratings import apply_plan, plan_of
from gateway.routes.console.billing.parts import OPERATOR, orgs_query, shared
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.tenancy.pages import page_query
from gateway.wire.admin.billing.reratings import NewRerating, PreviewQuery

page = ConsolePage(name="billing/reratings", title="Re-ratings", below="billing", in_any_org=True)
MAX_LINES = 500
"""The lines of a preview that are shown; its CSV has all."""


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    shown, book = None, request.services.generation.price_book
    if request.query.get("starts") and request.problem is None:
        request.require(OPERATOR)
        shown = await plan_of(request, read_period(request, request.query))
    async with request.system_db.connect() as conn:
        listed = reratings_of(request.org_id)
        listed_page = page_query(listed, rerating_table.c.id, request.cursor(), to_rerating)
        (rows, more), orgs = await ask_all(conn, listed_page, orgs_query(request))
    done = Table(
        "Re-ratings",
        rows,
        TableColumn("Begun", "created_at", kind="time"),
        TableColumn("From", lambda row: row.span.start, kind="moment"),
        TableColumn("To", lambda row: row.span.end, kind="moment"),
        TableColumn("Model", lambda row: row.span.model or "all"),
        TableColumn("Price list", lambda row: row.span.price_list or "as admitted"),
        TableColumn("Requests", "num_events", kind="count"),
        TableColumn("Difference", "difference_pico", kind="usd"),
        TableColumn("State", lambda row: state_of(row), kind="tag"),
        TableColumn("Id", "id", kind="id"),
    )
    return request.render(
        "billing/reratings",
        table=done if shown is None else to_preview(shown, whole=request.wants_csv),
        tables={"done": done},
        more=rows[-1].id if more else None,
        **shared(request, orgs),
        shown=shown,
        num_hidden=0 if shown is None else max(0, len(shown.lines) - MAX_LINES),
        before_pico=0 if shown is None else sum(line.before_pico for line in shown.lines),
        after_pico=0 if shown is None else sum(line.after_pico for line in shown.lines),
        list_choices=[
            ("", "that each was admitted by"),
            *((name, name) for name in sorted(lists_of(request.user, book))),
        ],
        month=f"{request.now:%Y-%m}-01",
        today=f"{request.now:%Y-%m-%d}",
    )


def state_of(row: Rerating) -> tuple[str, str]:
    if row.applied_at is not None:
        return "applied", "ok"
    return f"{row.num_applied:,} of {row.num_events:,}", "wait"


def to_preview(shown: ReratingPlan, *, whole: bool) -> Table:
    return Table(
        "What would change",
        shown.lines if whole else shown.lines[:MAX_LINES],
        TableColumn("Invoice", lambda line: line.invoice or "on none yet"),
        TableColumn("Model", "model"),
        TableColumn("What", lambda line: line.component.replace("_", " ")),
        TableColumn("Tier", "tier"),
        TableColumn("Quantity", "quantity", kind="count"),
        TableColumn("Requests", "num_events", kind="count"),
        TableColumn("Booked", "before_pico", kind="usd"),
        TableColumn("Anew", "after_pico", kind="usd"),
        TableColumn("Difference", "difference_pico", kind="usd"),
    )


def read_moment(name: str, text: str) -> int:
    """Return the first moment of a day (UTC). Raises: BadField."""
    try:
        return int(datetime.strptime(text.strip(), "%Y-%m-%d").replace(tzinfo=UTC).timestamp())
    except ValueError:
        raise BadField("must be a day such as 2026-11-01", param=name) from None


def read_period(request: ConsoleRequest, found: Any) -> PreviewQuery:
    """Raises: BadField."""
    return PreviewQuery(
        starts_at=read_moment("starts", found.get("starts", "")),
        ends_at=read_moment("ends", found.get("ends", "")),
        model=found.get("model", "").strip()[:200] or None,
        price_list=found.get("price_list", "").strip()[:200] or None,
    )


@page.post("/apply", needs=OPERATOR, again=show)
async def apply(request: ConsoleRequest) -> Response[bytes]:
    asked = read_period(request, request.form)
    done = await apply_plan(
        request,
        NewRerating(
            starts_at=asked.starts_at,
            ends_at=asked.ends_at,
            model=asked.model,
            price_list=asked.price_list,
            digest=request.form.get("digest", ""),
        ),
    )
    to = request.address(page.path)
    if done.applied_at is None:
        part = f"{done.num_applied:,} of {done.num_events:,} requests"
        return request.done(f"{part} are priced anew. Apply it again to go on.", tone="wait", to=to)
    return request.done(f"{done.num_applied:,} requests are priced anew.", to=to)


routes = page.routes
