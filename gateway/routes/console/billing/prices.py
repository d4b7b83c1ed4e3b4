"""Shows /console/billing/prices: what each model costs, now and later, and what else is agreed in a
price list. Operators compare a draft with the prices that there are, and put in force what they
saw."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import msgspec
from litestar import Response

from billing.errors import PriceBookError
from billing.events import COMPONENTS, TIERS, Component
from billing.pricing.drafts import Difference, changes_of, digest_of, format_price
from billing.pricing.entries import DEFAULT_LIST, PriceEntry
from billing.pricing.price_book import PriceBook
from gateway.console.tables import Table, TableColumn
from gateway.installation.items import create_item
from gateway.request_errors import BadField
from gateway.routes.admin.billing.prices import RuleView, is_over, lists_of, to_rule
from gateway.routes.admin.installation.settings import ChangeQuery, NewSetting, StoredChange
from gateway.routes.console.billing.parts import read_form, shared
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ROWS, ConsoleRequest

page = ConsolePage(name="billing/prices", title="Prices", below="billing")
PRICES = "operator:prices"
TITLES: dict[str, str] = {
    "uncached_input": "Input",
    "cache_read": "Cached",
    "cache_write_5m": "Written",
    "cache_write_1h": "Written, 1 h",
    "output": "Output",
    "reasoning_output": "Reasoning",
    "embedding_input": "Embedding",
    "tool_call": "A tool call",
    "batch_queue": "A batch line",
}
MAX_DRAFT_CHARS = 200_000


class PriceRow(msgspec.Struct, frozen=True, kw_only=True):
    entry: PriceEntry

    @property
    def id(self) -> str:
        """Return what pages go on behind."""
        entry = self.entry
        begins = f"{entry.valid_from.timestamp():.0f}"
        tier = TIERS.index(entry.tier)
        return f"{entry.model}\x1f{tier}\x1f{entry.min_total_input}\x1f{begins}"


class PriceDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A draft as it was compared. `rules`: its terms that are new."""

    name: str
    text: str
    digest: str
    changes: list[Difference]
    rules: list[RuleView]

    @property
    def table(self) -> Table:
        return Table(
            "What the draft changes",
            self.changes,
            TableColumn("Model", "model"),
            TableColumn("Tier", "tier"),
            TableColumn("What", lambda each: title_of(each.component)),
            TableColumn("From so many tokens", lambda each: each.min_total_input or None, "count"),
            TableColumn("Now", lambda each: amount_of(each, each.before), kind="figure"),
            TableColumn("Then", lambda each: amount_of(each, each.after), kind="figure"),
            TableColumn("Change", change_of, kind="tag"),
            TableColumn("Begins", "valid_from", kind="moment"),
        )

    @property
    def terms(self) -> Table:
        return to_rules(self.rules, "What else would be agreed")


def title_of(component: str) -> str:
    return TITLES.get(component, component.replace("_", " "))


def amount_in(component: Component, row: PriceRow) -> str | None:
    price = row.entry.prices.get(component)
    return None if price is None else format_price(component, price.pico_per_token)


def amount_of(difference: Difference, pico: int | None) -> str | None:
    return None if pico is None else format_price(difference.component, pico)


def change_of(difference: Difference) -> tuple[str, str]:
    before, after = difference.before, difference.after
    if before is None:
        return "new", "ok"
    if after is None:
        return "gone", "err"
    if not before:
        return "was free", "wait"
    percent = Decimal(100 * (after - before)) / before
    return f"{percent:+.1f} %", "wait" if after > before else "ok"


@page.get()
async def show(request: ConsoleRequest, draft: PriceDraft | None = None) -> Response[bytes]:
    book = request.services.generation.price_book
    names = sorted(lists_of(request.user, book), key=lambda name: (name != DEFAULT_LIST, name))
    chosen, wanted = request.value("list", names) or names[0], request.value("model")
    now = request.now.timestamp()
    rows = sorted(
        (
            PriceRow(entry=entry)
            for entry in book
            if entry.price_list == chosen
            and wanted.lower() in entry.model.lower()
            and (request.value("past") or not is_over(entry, now))
        ),
        key=lambda row: row.id,
    )
    after = request.value("after")
    behind = [row for row in rows if row.id > after] if after else rows
    shown = rows if request.wants_csv else behind[:ROWS]
    rules = [
        to_rule(rule)
        for rule in book.lists.rules
        if rule.price_list == chosen and not is_over(rule, now)
    ]
    return request.render(
        "billing/prices",
        table=to_table(shown, rows, now),
        more=shown[-1].id if len(behind) > len(shown) else None,
        **shared(request, []),
        lists=names,
        chosen=chosen,
        count=len(rows),
        rules=to_rules(rules),
        draft=draft,
        next_name=f"console-{request.now:%Y-%m-%d-%H%M}",
    )


def to_table(shown: Sequence[PriceRow], rows: Sequence[PriceRow], now: float) -> Table:
    """`rows`: all of them, which say what columns there are."""
    used = {component for row in rows for component in row.entry.prices}
    return Table(
        "Prices, US dollars a million tokens or a call",
        shown,
        TableColumn("Model", lambda row: row.entry.model),
        TableColumn("Tier", lambda row: row.entry.tier),
        TableColumn("From tokens", lambda row: row.entry.min_total_input or None, kind="count"),
        *(
            TableColumn(title_of(component), partial(amount_in, component), kind="figure")
            for component in COMPONENTS
            if component in used
        ),
        TableColumn("In force", lambda row: is_in_force(row.entry, now), kind="tag"),
        TableColumn("Since", lambda row: row.entry.valid_from, kind="moment"),
        TableColumn("Until", lambda row: row.entry.valid_to, kind="moment"),
    )


def is_in_force(entry: PriceEntry, now: float) -> tuple[str, str]:
    if is_over(entry, now):
        return "over", "plain"
    return ("now", "ok") if entry.covers(now) else ("later", "wait")


def to_rules(rules: list[RuleView], caption: str = "What else is agreed") -> Table:
    return Table(
        caption,
        rules,
        TableColumn("What", kind_of),
        TableColumn("Price list", lambda rule: rule.id.partition(":")[0]),
        TableColumn("Model", lambda rule: rule.model or "all"),
        TableColumn("Tier", lambda rule: rule.tier or "all"),
        TableColumn("Component", lambda rule: title_of(rule.component or "all")),
        TableColumn("Since", "valid_from", kind="moment"),
        TableColumn("Until", "valid_to", kind="moment"),
    )


def kind_of(rule: RuleView) -> str:
    """Say a rule in words."""
    if rule.discount_bps is not msgspec.UNSET and rule.amount_pico is msgspec.UNSET:
        return f"{Decimal(rule.discount_bps) / 100} % off"
    if rule.quantity is not msgspec.UNSET:
        return f"the first {rule.quantity:,} of a period are free"
    if rule.amount_pico is not msgspec.UNSET:
        return f"{format_price('tool_call', rule.amount_pico)} USD a period, used or not"
    return f"{rule.kind} price by quantity"


def read_draft(request: ConsoleRequest) -> tuple[str, dict[str, Any], PriceBook]:
    """Return a draft's text, its tables and its book. Raises: BadField."""
    text = request.form.get("draft", "").replace("\r\n", "\n")
    if len(text) > MAX_DRAFT_CHARS:
        raise BadField(f"must be at most {MAX_DRAFT_CHARS} characters", param="draft")
    try:
        found = tomllib.loads(text, parse_float=str)
        tables = msgspec.to_builtins(found, enc_hook=str)  # in the types of JSON, as it is stored
        return text, tables, PriceBook.of_tables(tables, "draft")
    except (tomllib.TOMLDecodeError, PriceBookError) as error:
        raise BadField(str(error).replace("\n", " "), param="draft") from None


async def compare(request: ConsoleRequest, *, is_applied: bool) -> PriceDraft:
    """Check a draft in full, and store it where that is wanted. Raises: BadField, InvalidField,
    NameTaken, ReadOnly."""
    text, tables, book = read_draft(request)
    name = request.form.get("name", "").strip()
    wanted = read_form(NewSetting, {"name": name, "content": tables})
    own = (entry for entry in book if entry.price_list == DEFAULT_LIST)
    in_force = request.services.generation.price_book
    changes, known = changes_of(own, in_force), {rule.id for rule in in_force.lists.rules}
    digest = digest_of(text.encode(), changes)
    if is_applied and request.form.get("digest") != digest:
        raise BadField(
            "the draft, or the prices that there are, changed since: look at it again",
            param="draft",
        )
    change = StoredChange(request, ChangeQuery(dry_run=not is_applied), "price_book")
    async with change.transaction() as conn:
        await create_item(conn, change.made("price_book", wanted), **change.arguments)
    rules = [to_rule(rule) for rule in book.lists.rules if rule.id not in known]
    return PriceDraft(name=name, text=text, digest=digest, changes=changes, rules=rules)


@page.post("/compare", needs=PRICES, again=show)
async def show_draft(request: ConsoleRequest) -> Response[bytes]:
    return await show(request, await compare(request, is_applied=False))


@page.post("/apply", needs=PRICES, again=show)
async def apply(request: ConsoleRequest) -> Response[bytes]:
    done = await compare(request, is_applied=True)
    return request.done(f"The price book {done.name} is stored, and in force within two seconds.")


routes = page.routes
