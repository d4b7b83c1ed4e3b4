"""Shows /console/requests: requests by what they were, as they come, and one of them whole: where
its time went, what it used, why the cache stopped, what it cost and how that is booked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, get_args
from urllib.parse import quote

import msgspec
from litestar import Response
from litestar.response import Stream

from billing.errors import MoneyError
from billing.events import Component
from billing.ledger.tags import to_tag
from billing.money import format_usd, usd
from billing.pricing.drafts import format_price
from billing.pricing.rating import price_of, rate
from billing.reports.request_record import RequestRecord, find_record
from foundation import sse
from gateway.batches.batches import MESSAGES_PREFIX, PREFIX
from gateway.console.model_names import NO_MODEL, model_name
from gateway.console.tables import Table, TableColumn
from gateway.permissions import SCOPE_CONTENT
from gateway.principal import SCOPE_USAGE_READ
from gateway.request_errors import BadField
from gateway.request_log.content_reading import explain_content
from gateway.request_log.live_tail import TooManyWatchers
from gateway.request_log.search import (
    FoundRequest,
    Outcome,
    Search,
    find_request,
    find_requests,
    read_id,
    time_of,
)
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.routes.console.overview import LANES
from gateway.telemetry.metrics import UNKNOWN_MODEL
from gateway.tenancy.errors import NotFound

OUTCOMES: Mapping[Outcome, str] = {
    "ok": "answered",
    "bad": "not answered",
    "failed": "failed (5xx)",
    "limited": "limited (429)",
    "refused": "refused (4xx)",
    "left": "client left",
    "missed": "missed its SLO",
}
assert OUTCOMES.keys() == set(get_args(Outcome))
BATCH_PREFIXES = (PREFIX, MESSAGES_PREFIX)
BLOCK_TOKENS = 16
"""Tokens of a block of the KV cache, of our own engines."""
EVENT_STREAM = "text/event-stream"
KEEP_ALIVE_S = 15.0
LONGEST_WATCH_S = 600.0
"""Then the browser connects again. Who signed out meanwhile, or has another role, is told nothing
more after KEEP_ALIVE_S."""
STAGE_WORDS = {
    "authenticate": ("authenticate", "other"),
    "read": ("read", "other"),
    "admit": ("admit", "other"),
    "prepare": ("prepare", "other"),
    "route": ("route", "other"),
    "attempt": ("attempt", "accent"),
    "queue": ("queue", "written"),
    "prefill": ("prefill", "uncached"),
    "decode": ("decode", "output"),
    "tool_call": ("tool", "warn"),
    "mcp_request": ("tool", "warn"),
    "settle": ("settle", "other"),
}
"""The word for each stage, that of its span, and its colour."""
CAUSES = {
    "intact": "All of it that an earlier prompt had was cached.",
    "first": "No earlier prompt that is remembered began like it.",
    "changed": "From there on it differs from the earlier prompt: put what changes (a date, a name,"
    " an order of tools) behind what does not.",
    "evicted": "From there on it was the same as before, but not in the cache any more.",
    "restarted": "The engine was started anew since the earlier prompt.",
    "other_replica": "The earlier prompt went to another replica.",
    "not_kept": "The earlier prompt was not kept.",
    "unmarked": "No part of it was marked to be cached.",
    "too_short": "It is too short to be cached.",
    "unknown": "Nobody says why no more of it was cached.",
}
ERRORS = {
    "model_not_found": "No model of this name is served here, or this key may not use it.",
    "rate_limit_exceeded": "A limit of its key, project or organization was reached.",
    "insufficient_quota": "A budget, or the credit of its organization, is used up.",
    "organization_suspended": "An invoice of this organization is overdue.",
    "context_length_exceeded": "Its prompt and answer do not fit into the model's context.",
    "model_without_price": "What may be spent is capped, and the model has no price.",
    "overloaded": "All replicas of the model had their queues full.",
    "service_unavailable": "The model, or what the gateway needs for it, was away.",
    "deadline_exceeded": "The answer was not whole in the time that the client gave it.",
    "insufficient_permissions": "Its credential lacks a scope.",
    "server_error": "The model stopped before the answer was whole.",
    "invalid_request_error": "A field of it was not what the API takes.",
    # Anthropic's types
    "rate_limit_error": "A limit of its key, project or organization was reached.",
    "not_found_error": "No model of this name is served here, or this key may not use it.",
    "billing_error": "A budget is used up, or an invoice is overdue.",
    "overloaded_error": "The model, or what the gateway needs for it, was away or too busy.",
    "timeout_error": "The answer was not whole in the time that the client gave it.",
    "api_error": "The model stopped before the answer was whole.",
}
"""The meaning of the most usual codes and types of errors."""
page = ConsolePage(name="requests", title="Requests", letter="r", needs=SCOPE_USAGE_READ)


class PriceLine(msgspec.Struct, frozen=True, kw_only=True):
    component: str
    quantity: int | None
    rate: str | None
    """USD a million tokens, or a call."""
    amount_pico: int


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """A stage in the picture of a request. `left` and `width`: per thousand of its time."""

    word: str
    about: str
    colour: str
    left: float
    width: float
    took_ms: float
    outcome: str
    depth: int = 0


@page.get()
async def show(request: ConsoleRequest) -> Response[bytes]:
    named = request.value("q")
    if (digits := read_id(named)) is not None:
        return request.done(to=f"{page.path}/req_{digits}")
    if named.startswith(BATCH_PREFIXES):
        return request.done(to=request.address(q=None, batch=named, range="30d"))
    search = read_search(request)
    async with request.transaction() as conn:
        found = await find_requests(
            conn, request.org_id, search, after=request.query.get("after") or None
        )
    return request.render(
        "requests",
        table=requests_table(request, found.rows),
        more=found.after,
        looked_until=found.looked_until,
        search=search,
        unknown=named,
        outcomes=list(OUTCOMES.items()),
        models=[*sorted(request.services.telemetry.models), (UNKNOWN_MODEL, NO_MODEL)],
        lanes=LANES,
        live=request.address(f"{page.path}/live", **own_filters(request)),
    )


def own_filters(request: ConsoleRequest) -> dict[str, str | None]:
    names = ("project", "key", "model", "lane", "outcome", "batch", "error_code")
    return {name: request.value(name) or None for name in names}


def read_search(request: ConsoleRequest) -> Search:
    """Raises: BadField."""
    outcome: Any = request.value("outcome", tuple(OUTCOMES))
    return Search(
        start=request.range.start,
        end=request.range.end + timedelta(seconds=1),
        project=request.value("project"),
        key=request.value("key"),
        model=request.value("model"),
        lane=request.value("lane", LANES),
        outcome=outcome,
        least_pico=_money(request, "cost"),
        least_ms=_number(request, "ms"),
        least_ttft_ms=_number(request, "ttft"),
        batch=request.value("batch"),
        error_code=request.value("error_code"),
        tag=_tag(request.value("tag")),
    )


def _tag(text: str) -> tuple[str, str] | None:
    if not text:
        return None
    tag = to_tag(text)
    if tag is None:
        raise BadField("must be a tag and its value, such as team=search", param="tag")
    return tag


def _number(request: ConsoleRequest, name: str) -> float:
    text = request.value(name)
    try:
        number = float(text or 0)
    except ValueError:
        number = -1
    if not 0 <= number <= 1e9:
        raise BadField("must be a number of milliseconds", param=name)
    return number


def _money(request: ConsoleRequest, name: str) -> int:
    text = request.value(name)
    try:
        pico = usd(text or "0")
    except MoneyError:
        pico = -1
    if not 0 <= pico < 2**63:
        raise BadField("must be an amount in USD, such as 0.01", param=name)
    return pico


def state_of(row: FoundRequest) -> tuple[str, str]:
    if row.status == 499:
        return "left", "plain"
    if row.status < 400:
        return str(row.status), "ok"
    return str(row.status), "err" if row.status >= 500 else "wait"


def requests_table(
    request: ConsoleRequest, rows: Sequence[FoundRequest], *, is_live: bool = False
) -> Table:
    """`is_live`: they stay on a page that nobody loads again."""
    return Table(
        "Requests",
        rows,
        TableColumn("When", "at", kind="clock" if is_live else "time"),
        TableColumn("Request", lambda row: f"req_{row.id}", kind="id", link=address_of),
        TableColumn("Status", state_of, kind="tag", detail=lambda row: row.error_code),
        TableColumn("Error", "error_code") if request.wants_csv else None,
        TableColumn("Model", lambda row: model_name(row.model)),
        TableColumn("Key", lambda row: row.key_name or row.key),
        TableColumn("Lane", "lane"),
        TableColumn("Input", "input_tokens", kind="count"),
        TableColumn("Cached", "cached_tokens", kind="count"),
        TableColumn("Output", "output_tokens", kind="count"),
        TableColumn("First token", "ttft_ms", kind="ms"),
        TableColumn("Took", "duration_ms", kind="ms"),
        TableColumn("Cost", "cost_pico", kind="usd"),
    )


def address_of(row: FoundRequest) -> str:
    return f"{page.path}/req_{row.id}"


@page.get("/live")
async def follow(request: ConsoleRequest) -> Stream:
    """Stream the rows of requests as they come, for the page's script."""
    wanted = {name: value for name, value in own_filters(request).items() if value}
    outcome = wanted.pop("outcome", None)

    def is_wanted(row: FoundRequest) -> bool:
        if outcome is not None and not is_outcome(row, outcome):
            return False
        return all(getattr(row, name) == value for name, value in wanted.items())

    async def events() -> AsyncIterator[bytes]:
        yield sse.encode(b"", b"open", retry_ms=2000)
        try:
            async with request.services.live_tail.watching(request.org_id) as watcher:
                async with asyncio.timeout(LONGEST_WATCH_S):
                    asked_at = time.monotonic()
                    while not watcher.has_ended:
                        rows = [row for row in await watcher.read(KEEP_ALIVE_S) if is_wanted(row)]
                        if time.monotonic() - asked_at >= KEEP_ALIVE_S:
                            if not await request.is_still_allowed():
                                return
                            asked_at = time.monotonic()
                        yield rendered(request, rows) if rows else sse.KEEPALIVE
        except TooManyWatchers:
            yield sse.encode(b"Too many watch at once; try again later.", b"refused")
        except TimeoutError:
            return

    return Stream(events(), media_type=EVENT_STREAM, headers={"cache-control": "no-store"})


def rendered(request: ConsoleRequest, rows: Sequence[FoundRequest]) -> bytes:
    """Return an event with rows as the table has them, the newest first."""
    newest = sorted(rows, key=lambda row: (row.at, row.id), reverse=True)
    table = requests_table(request, newest, is_live=True)
    shown = request.render("request_rows", table=table)
    return sse.encode(shown.content.replace(b"\r", b""), b"rows")


def is_outcome(row: FoundRequest, outcome: str) -> bool:
    status = row.status
    return {
        "ok": status < 400,
        "bad": status >= 400,
        "refused": 400 <= status < 499 and status != 429,
        "limited": status == 429,
        "failed": status >= 500,
        "left": status == 499,
        "missed": row.is_good is False,
    }[outcome]


@page.get("/{request_id:str}")
async def show_one(request: ConsoleRequest) -> Response[bytes]:
    digits = read_id(request.ids["request_id"])
    if digits is None:
        raise NotFound("request", "no id of a request: one is req_ and 32 digits")
    async with request.transaction() as conn:
        row = await find_request(conn, request.org_id, digits)
    made_at = time_of(digits).timestamp()
    async with request.system_db.connect() as conn:  # tenants do not see the ledger
        record = await find_record(conn, request.org_id, f"req_{digits}", made_at)
    if row is None and record is None:
        raise NotFound("request", f"there is none with the id req_{digits}")
    slo = None
    if row is not None and row.lane in LANES:
        slo = request.services.generation.slos.of(row.model, row.lane)
    return request.render(
        "request",
        digits=digits,
        row=row,
        state=None if row is None else state_of(row),
        slo=slo,
        bars=[] if row is None else bars_of(row),
        record=record,
        tables={"price": price_table([] if record is None else lines_of(record))},
        table=None if record is None else ledger_table(record),
        model=None if row is None else model_name(row.model),
        why=None if row is None or row.error_code is None else ERRORS.get(row.error_code, ""),
        cause=None if row is None or row.cache_cause is None else CAUSES.get(row.cache_cause),
        gateway=request.http.app.state.public_url or "",
        reads_content=row is not None and request.can(SCOPE_CONTENT, row.project),
        trace_view=None if row is None else trace_view_of(request, row.trace),
        block_tokens=BLOCK_TOKENS,
    )


def trace_view_of(request: ConsoleRequest, trace: str) -> str | None:
    """Return the address of a trace where the installation's are looked at."""
    configuration = request.services.configuration
    traces = None if configuration is None else configuration.settings.traces
    if traces is None or traces.view_url is None:
        return None
    return traces.view_url.replace("{trace}", quote(trace, safe=""))


@page.get("/{request_id:str}/content", renews=True)
async def show_content(request: ConsoleRequest) -> Response[bytes]:
    """Show its texts; the page of the request has them in it, once they are there."""
    async with request.transaction() as conn:
        row = await find_request(conn, request.org_id, request.ids["request_id"])
        if row is None or not row.has_content:
            raise NotFound("request", "no texts of it are stored")
        request.require(SCOPE_CONTENT, row.project)
        found = await explain_content(
            conn,
            request.services.content_log.cipher,
            request.org_id,
            row.id,
            compares=row.cache_cause == "changed",
            reader=request.actor,
        )
    return request.render("request_content", row=row, found=found, address=address_of(row))


def bars_of(row: FoundRequest) -> list[Bar]:
    """Return the stages as a picture shows them: an attempt only if nothing is known of its parts,
    or if there are several."""
    stages = [(str(s[0]), int(s[1]), int(s[2]), str(s[3]), str(s[4])) for s in row.stages]
    end = max([row.duration_us, *(began + took for _, began, took, _, _ in stages)], default=0)
    whole = max(1, end)
    has_parts = any(name in ("prefill", "decode") for name, *_ in stages)
    attempts = sum(name == "attempt" for name, *_ in stages)
    found = []
    for name, began, took, about, outcome in stages:
        if name == "attempt" and has_parts and attempts == 1 and not outcome:
            continue
        word, colour = STAGE_WORDS.get(name, (name.replace("_", " "), "other"))
        found.append(
            Bar(
                word=word,
                about=about,
                colour="bad" if outcome and name in ("attempt", "tool_call") else colour,
                left=round(1000 * max(0, began) / whole, 2),
                width=round(max(3.0, 1000 * took / whole), 2),
                took_ms=took / 1000,
                outcome=outcome,
            )
        )
    return found


def lines_of(record: RequestRecord) -> list[PriceLine]:
    """Return what was billed, component by component, over all attempts; the last line is what was
    charged."""
    sums: dict[tuple[Component, int | None], list[int]] = {}
    for event in record.events:
        if event.kind != "usage":
            continue
        for line in rate(event.quantities, event.attempt.prices).lines:
            price = price_of(line.component, event.attempt.prices)
            each = None if price is None else price.of(event.quantities.input_total).pico_per_token
            total = sums.setdefault((line.component, each), [0, 0])
            total[0] += line.quantity
            total[1] += line.amount_pico
    lines = [
        PriceLine(
            component=component.replace("_", " "),
            quantity=quantity,
            rate=None if price is None else format_price(component, price),
            amount_pico=amount,
        )
        for (component, price), (quantity, amount) in sums.items()
    ]
    charged = PriceLine(
        component="charged", quantity=None, rate=None, amount_pico=record.charged_pico
    )
    return [*lines, charged] if lines else []


def price_table(lines: Sequence[PriceLine]) -> Table:
    return Table(
        "Price",
        lines,
        TableColumn("Component", "component"),
        TableColumn("Quantity", "quantity", kind="count"),
        TableColumn("Rate", "rate", kind="figure", hint="USD a million tokens, or a call"),
        TableColumn("USD", lambda line: format_usd(line.amount_pico), kind="figure"),
    )


def ledger_table(record: RequestRecord) -> Table:
    return Table(
        "Ledger entries",
        record.transfers,
        TableColumn("Posted", "posted_at", kind="moment"),
        TableColumn("Amount", "amount_pico", kind="usd"),
        TableColumn("Debit", "debit"),
        TableColumn("Credit", "credit"),
        TableColumn("Kind", "kind"),
        TableColumn("Corrects", "corrects", kind="id"),
        TableColumn("Transfer", "id", kind="id"),
    )


routes = page.routes
