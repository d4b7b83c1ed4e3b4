"""`tollgate usage` and `tollgate costs`: what was used in a period, and what it cost.

Read from the running gateway, whose reports are those of the bill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import click

from foundation.periods import Span, to_minute
from gateway.cli.shared.tables import Column, Output, show, to_money, with_output
from gateway.cli.shared.target import (
    KEYS,
    OTHER_ORG,
    PROJECTS,
    Gateway,
    examples,
    with_gateway,
)
from gateway.cli.shared.times import period

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
LISTS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "project_id": (PROJECTS, ("name",), {"include_archived": True}),
    "api_key_id": (KEYS, ("name",), {}),
    "user_id": ("/v1/organization/users", ("email", "name"), {}),
}
"""A list tells the names of what is known by an id: its path, the fields of a name, the query."""
OF_OWN_ORG = ("user_id",)
"""These lists are of the organization of the key alone."""
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
        "tollgate usage today --by key --org acme",
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
@OTHER_ORG
async def usage(
    gateway: Gateway,
    span: Span,
    org: str | None,
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
    org_id = await gateway.org_id(org)
    query = {
        "org_id": org_id,
        "group_by": keys,
        "models": list(models),
        "project_ids": await ids_of(gateway, projects, org_id),
    }
    found = await buckets(
        gateway, "/v1/organization/usage/completions", span, width, MOST_BUCKETS[width], query
    )
    rows = summed(found, keys, [key for _, key in COUNTS], per is not None)
    await add_names(gateway, rows, keys, org_id)
    columns = [*columns_of(keys, per is not None), *(Column(t, k, "number") for t, k in COUNTS)]
    tell(span, output)
    show(rows, columns, output, empty="Nothing was used.")


@click.command(
    epilog=examples(
        "tollgate costs",
        "tollgate costs 2026-11 --by project --org acme",
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
@OTHER_ORG
async def costs(
    gateway: Gateway,
    span: Span,
    org: str | None,
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
    org_id = await gateway.org_id(org)
    wanted = await ids_of(gateway, projects, org_id)
    query = {"org_id": org_id, "group_by": keys, "project_ids": wanted}
    found = await buckets(gateway, "/v1/organization/costs", span, "1d", MOST_COST_BUCKETS, query)
    for _, result in found:
        result["amount_usd"] = Decimal(result["amount"]["value"])
    rows = summed(found, keys, ["amount_usd"], per is not None)
    await add_names(gateway, rows, keys, org_id)
    columns = [
        *columns_of(keys, per is not None),
        Column("USD", "amount_usd", "number", show=lambda row: to_money(row["amount_usd"])),
    ]
    tell(span, output)
    show(rows, columns, output, empty="Nothing was spent.")
    if output.form == "table" and len(rows) > 1:
        click.echo(f"In all {to_money(sum((row['amount_usd'] for row in rows), Decimal()))} USD")


async def ids_of(gateway: Gateway, projects: Sequence[str], org_id: str | None) -> list[str | None]:
    return [await gateway.project_id(each, org_id) for each in projects]


async def add_names(
    gateway: Gateway, rows: Sequence[dict[str, Any]], keys: Iterable[str], org_id: str | None
) -> None:
    """Put the name beside each id of a project, a key or a user, as far as the key may see it."""
    for key in keys:
        if key not in LISTS or not any(row[key] for row in rows):
            continue
        path, fields, query = LISTS[key]
        known = {}
        if org_id is None or key not in OF_OWN_ORG:
            known = await gateway.names(path, *fields, **query, org_id=org_id)
        for row in rows:
            row[name_of(key)] = known.get(row[key], row[key])


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
    columns = [start] if by_time else []
    for key in keys:
        if key in LISTS:
            columns.append(Column(title(key), name_of(key)))
            columns.append(Column(f"{title(key)} ID", key, "id", gives_way=True))
        else:
            columns.append(Column(title(key), key))
    return columns


def name_of(key: str) -> str:
    """Return the field of the name of what is known by the id `key`."""
    return f"{key.removesuffix('_id')}_name"


def title(key: str) -> str:
    names = {"api_key_id": "KEY", "line_item": "ITEM", "service_tier": "TIER"}
    return names.get(key, key.removesuffix("_id").upper())


def tell(span: Span, output: Output) -> None:
    if output.form == "table":
        click.echo(f"{span}:", err=True)
