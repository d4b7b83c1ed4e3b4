"""`tollgate usage` and `tollgate costs`: what was used in a period, and what it cost.

Read from the running gateway, whose reports are those of the bill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import click

from gateway.cli.shared.tables import Column, Kind, Output, show, to_money, with_output
from gateway.cli.shared.target import Gateway, examples, with_gateway
from gateway.cli.shared.times import Span, period, to_minute

GROUPS = {
    "model": "model",
    "project": "project_id",
    "user": "user_id",
    "key": "api_key_id",
    "batch": "batch",
    "tier": "service_tier",
}
COST_GROUPS = {
    "item": "line_item",
    "project": "project_id",
    "user": "user_id",
    "key": "api_key_id",
}
IDS = ("project_id", "user_id", "api_key_id")
WIDTHS = {"day": "1d", "hour": "1h", "minute": "1m"}
MOST_BUCKETS = {"1d": 31, "1h": 168, "1m": 1440}
"""The largest page of a usage report, by the width of its buckets (`billing.reports.usage`)."""
MOST_COST_BUCKETS = 180
COUNTS = (
    ("REQUESTS", "num_model_requests"),
    ("INPUT", "input_tokens"),
    ("CACHED", "input_cached_tokens"),
    ("OUTPUT", "output_tokens"),
)
SECONDS_OF = {"1d": 86400, "1h": 3600, "1m": 60}
MAX_BUCKETS = 50_000
PROJECT = click.option(
    *("--project", "projects"), multiple=True, metavar="NAME|ID", help="Only of this project."
)


@click.command(
    epilog=examples(
        "tollgate usage",
        "tollgate usage yesterday --by project",
        "tollgate usage last 7d --per day",
    )
)
@with_gateway
@with_output
@period("last 7d")
@click.option(
    *("--by", "groups"),
    multiple=True,
    default=("model",),
    show_default=True,
    metavar="|".join(GROUPS) + "|tag:KEY",
    help="Tell these apart; may be given several times.",
)
@click.option("--per", type=click.Choice(list(WIDTHS)), help="A row for each. Default: one in all.")
@click.option("--model", "models", multiple=True, help="Only of this model.")
@PROJECT
async def usage(
    gateway: Gateway,
    span: Span,
    groups: tuple[str, ...],
    per: str | None,
    models: tuple[str, ...],
    projects: tuple[str, ...],
    output: Output,
) -> None:
    """Show the tokens and requests of a period.

    PERIOD: today, yesterday, last 7d (the default), this month, 2026-11, 2026-11-01..2026-11-15; of
    UTC.
    """
    keys = [named(each, GROUPS) for each in groups]
    width = WIDTHS[per] if per else width_of(span)
    span = widened(span, width)
    query = {
        "group_by": keys,
        "models": list(models),
        "project_ids": await ids_of(gateway, projects),
    }
    found = await buckets(
        gateway, "/v1/organization/usage/completions", span, width, MOST_BUCKETS[width], query
    )
    rows = summed(found, keys, [key for _, key in COUNTS], per is not None)
    columns = [*columns_of(keys, per is not None), *(Column(t, k, "number") for t, k in COUNTS)]
    tell(span, output)
    show(rows, columns, output, empty="Nothing was used.")


@click.command(
    epilog=examples(
        "tollgate costs",
        "tollgate costs 2026-11 --by project",
        "tollgate costs last month --per day",
    )
)
@with_gateway
@with_output
@period("this month")
@click.option(
    *("--by", "groups"),
    multiple=True,
    default=("item",),
    show_default=True,
    metavar="|".join(COST_GROUPS) + "|tag:KEY",
    help="Tell these apart; may be given several times.",
)
@click.option("--per", type=click.Choice(["day"]), help="A row for each. Default: one in all.")
@PROJECT
async def costs(
    gateway: Gateway,
    span: Span,
    groups: tuple[str, ...],
    per: str | None,
    projects: tuple[str, ...],
    output: Output,
) -> None:
    """Show what a period cost, in USD.

    Costs are of whole days of UTC. PERIOD: this month (the default), last month, last 30d, 2026-11,
    2026-11-01..2026-11-15.
    """
    keys, span = [named(each, COST_GROUPS) for each in groups], widened(span, "1d")
    query = {"group_by": keys, "project_ids": await ids_of(gateway, projects)}
    found = await buckets(gateway, "/v1/organization/costs", span, "1d", MOST_COST_BUCKETS, query)
    for _, result in found:
        result["amount_usd"] = Decimal(result["amount"]["value"])
    rows = summed(found, keys, ["amount_usd"], per is not None)
    columns = [
        *columns_of(keys, per is not None),
        Column("USD", "amount_usd", "number", show=lambda row: to_money(row["amount_usd"])),
    ]
    tell(span, output)
    show(rows, columns, output, empty="Nothing was spent.")
    if output.form == "table" and len(rows) > 1:
        click.echo(f"In all {to_money(sum((row['amount_usd'] for row in rows), Decimal()))} USD")


async def ids_of(gateway: Gateway, projects: Sequence[str]) -> list[str | None]:
    return [await gateway.project_id(each) for each in projects]


def named(group: str, known: dict[str, str]) -> str:
    """Return a report's name of a group. Raises: click.BadParameter."""
    if group.startswith("tag:"):
        return group
    if group not in known:
        names = ", ".join((*known, "tag:KEY"))
        raise click.BadParameter(f"{group!r} is none of {names}", param_hint="--by")
    return known[group]


def width_of(span: Span) -> str:
    """Return the width of buckets whose edges are the span's, or nearly: few pages hold all."""
    query = span.to_query()
    for width, seconds in SECONDS_OF.items():
        if not any(each % seconds for each in query.values()):
            return width
    return "1m" if span.seconds <= 2 * 86400 else "1h"


def widened(span: Span, width: str) -> Span:
    """Return the span of whole buckets that holds `span`: what a report tells of it."""
    query, seconds = span.to_query(), SECONDS_OF[width]
    start = query["start_time"] // seconds * seconds
    end = -(-query["end_time"] // seconds) * seconds
    return Span(datetime.fromtimestamp(start, UTC), datetime.fromtimestamp(end, UTC))


async def buckets(
    gateway: Gateway, path: str, span: Span, width: str, most: int, query: dict[str, Any]
) -> list[tuple[int, dict[str, Any]]]:
    """Return each result with the start of its bucket, of all pages of a report."""
    if span.seconds / SECONDS_OF[width] > MAX_BUCKETS:
        raise click.BadParameter(f"{span} is too long for rows of {width}", param_hint="PERIOD")
    found: list[tuple[int, dict[str, Any]]] = []
    page: str | None = None
    while True:
        answer = await gateway.get(
            path, **span.to_query(), **query, bucket_width=width, limit=most, page=page
        )
        for bucket in answer["data"]:
            found += ((bucket["start_time"], each) for each in bucket["results"])
        if not answer.get("has_more"):
            return found
        page = answer["next_page"]


def summed(
    found: Iterable[tuple[int, dict[str, Any]]],
    keys: Sequence[str],
    counts: Sequence[str],
    by_time: bool,
) -> list[dict[str, Any]]:
    """Add up results of the same group, and of the same bucket where `by_time`; largest first, or
    in the order of time."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for start, result in found:
        group = {key: result.get("tag" if key.startswith("tag:") else key) for key in keys}
        if by_time:
            group = {"start_time": start, **group}
        row = rows.setdefault(tuple(group.values()), group | dict.fromkeys(counts, 0))
        for count in counts:
            row[count] += result[count]
    by_size = sorted(rows.values(), key=lambda row: -row[counts[-1]])
    return sorted(by_size, key=lambda row: row["start_time"]) if by_time else by_size


def columns_of(keys: Sequence[str], by_time: bool) -> list[Column]:
    start = Column("FROM", "start_time", "time", show=lambda row: to_minute(row["start_time"]))
    return [*([start] if by_time else []), *(Column(title(key), key, kind(key)) for key in keys)]


def title(key: str) -> str:
    names = {"api_key_id": "KEY", "line_item": "ITEM", "service_tier": "TIER"}
    return names.get(key, key.removesuffix("_id").upper())


def kind(key: str) -> Kind:
    return "id" if key in IDS else "text"


def tell(span: Span, output: Output) -> None:
    if output.form == "table":
        click.echo(f"{span}:", err=True)
