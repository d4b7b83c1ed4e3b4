"""`tollgate budgets`, `alerts` and `mails`: what may be spent, what is, what was reached, and who
was told."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import click

from foundation.periods import read_span, to_minute
from gateway.cli.shared.listing import listing
from gateway.cli.shared.tables import Column, Output, show, to_money, with_output
from gateway.cli.shared.target import (
    KEYS,
    OTHER_ORG,
    PROJECTS,
    ROWS,
    Gateway,
    GatewayError,
    examples,
    with_gateway,
)

CAPS = "/v1/admin/spend-caps"
PERIODS = {"day": "today", "month": "this month"}
SCOPES = ("project_id", "key_id", "model", "tag")
COLUMNS = (
    Column("OF", "of_name"),
    Column("PER", "period"),
    Column("USD", "amount_usd", "number", show=lambda row: to_money(row["amount_usd"])),
    Column("SPENT", "spent_usd", "number", show=lambda row: to_money(row["spent_usd"])),
    Column("HARD", "hard", gives_way=True),
    Column("ID", "id", "id"),
    Column("OF ID", "of", "id", gives_way=True),
)


ALERT_COLUMNS = (
    Column("WHEN", "occurred_at", "time", show=lambda row: to_minute(row["occurred_at"])),
    Column("REACHED", "threshold_percent", "number", show=lambda r: f"{r['threshold_percent']}%"),
    Column("MEASURE", "measure"),
    Column("OF", "scope", "id", show=lambda row: scope_of(row)),
    Column("USED", "used", "number", show=lambda row: quantity(row["used"])),
    Column("LIMIT", "limit", "number", show=lambda row: quantity(row["limit"])),
    Column("PERIOD", "period", gives_way=True),
    Column("REASON", "reason", gives_way=True),
    Column("ID", "id", "id", gives_way=True),
)


MAIL_COLUMNS = (
    Column("WHEN", "created_at", "time", show=lambda row: to_minute(row["created_at"])),
    Column("EVENT", "event_type"),
    Column("USER", "user_id", "id"),
    Column("STATE", "state"),
    Column("TRIES", "attempts", "number", gives_way=True),
    Column("CODE", "last_status", "number", gives_way=True),
    Column("FAILURE", "last_failure", gives_way=True),
    Column("ID", "id", "id", gives_way=True),
)


@click.group(
    epilog=examples(
        "tollgate budgets list",
        "tollgate budgets set 500",
        "tollgate budgets set 20 --per day --project web",
        "tollgate budgets remove cap_0192",
    )
)
def budgets() -> None:
    """Show and set what may be spent."""


@budgets.command("list", epilog=examples("tollgate budgets list", "tollgate budgets list --csv"))
@with_gateway
@with_output
@ROWS
@OTHER_ORG
async def list_(gateway: Gateway, org: str | None, rows: int, output: Output) -> None:
    """List the budgets, and what is spent of those of an organization, a project or a key.

    Spent is what the books have of the day or the month that runs.
    """
    org_id = await gateway.org_id(org)
    found = await gateway.rows(CAPS, rows, org_id=org_id)
    spent = await spending(gateway, found, org_id)
    names: dict[str, str] = {}
    for path, scope in ((PROJECTS, "project_id"), (KEYS, "key_id")):
        if any(cap[scope] for cap in found):
            names |= await gateway.names(path, "name", org_id=org_id)
    for cap in found:
        cap["of"] = next((cap[each] for each in SCOPES if cap[each]), cap["org_id"])
        kind = "organization" if cap["scope"] == "org" else cap["scope"]
        name = "" if cap["scope"] == "org" else names.get(cap["of"], cap["of"])
        cap["of_name"] = f"{kind} {name}".rstrip()
        cap["spent_usd"] = spent.get(cap["id"])
    show(found, COLUMNS, output, empty="There is no budget: nothing bounds what is spent.")


async def spending(
    gateway: Gateway, caps: Iterable[dict[str, Any]], org_id: str | None
) -> dict[str, str]:
    """Return what is spent of each cap, by its id, where a report of costs can tell."""
    spent: dict[str, str] = {}
    reports: dict[str, list[dict[str, Any]]] = {}
    for cap in caps:
        period = cap["period"]
        if period not in PERIODS or cap["scope"] not in ("org", "project", "key"):
            continue
        if period not in reports:
            span = read_span(PERIODS[period], datetime.now(UTC))
            answer = await gateway.get(
                "/v1/organization/costs",
                **span.to_query(),
                org_id=org_id,
                group_by=["project_id", "api_key_id"],
                limit=31,
            )
            reports[period] = [each for day in answer["data"] for each in day["results"]]
        wanted = {"project_id": cap["project_id"], "api_key_id": cap["key_id"]}
        named = {name: value for name, value in wanted.items() if value is not None}
        amounts = (
            Decimal(each["amount"]["value"])
            for each in reports[period]
            if all(each[name] == value for name, value in named.items())
        )
        spent[cap["id"]] = f"{sum(amounts, Decimal()):f}"
    return spent


@budgets.command(
    "set",
    epilog=examples(
        "tollgate budgets set 500",
        "tollgate budgets set 20 --per day --project web",
        "tollgate budgets set 100 --model penny --soft",
    ),
)
@with_gateway
@click.argument("usd")
@click.option(
    "--per",
    "period",
    type=click.Choice(["day", "month", "total"]),
    default="month",
    show_default=True,
    help="The time in which it may be spent; days and months are of UTC.",
)
@click.option("--project", metavar="NAME|ID", help="Bound a project.")
@click.option("--key-id", help="Bound a key, by its id.")
@click.option("--model", help="Watch a model. Such a budget refuses nothing.")
@click.option("--tag", metavar="KEY=VALUE", help="Watch a tag. Such a budget refuses nothing.")
@click.option("--soft", is_flag=True, help="Raise alerts, and refuse nothing.")
@OTHER_ORG
async def set_(
    gateway: Gateway,
    usd: str,
    period: str,
    soft: bool,
    org: str | None,
    project: str | None,
    **others: str | None,
) -> None:
    """Set what may be spent, in USD.

    A new budget, or another amount for the one that there is: of the organization, unless a
    project, a key, a model or a tag is named. In force within a second. At 50, 80 and 100 percent
    an alert is raised.
    """
    org_id = await gateway.org_id(org)
    scope = {"project_id": await gateway.project_id(project, org_id), **others}
    soft = soft or scope["model"] is not None or scope["tag"] is not None
    there = [
        cap
        for cap in await gateway.rows(CAPS, 100_000, org_id=org_id)
        if cap["period"] == period and all(cap[name] == scope[name] for name in SCOPES)
    ]
    if there:
        body: dict[str, Any] = {"amount_usd": usd, "hard": not soft}
        path = f"{CAPS}/{there[0]['id']}"
        made = await gateway.send("PATCH", path, body, {"org_id": org_id})
    else:
        body = {"amount_usd": usd, "hard": not soft, "period": period}
        body |= {name: value for name, value in scope.items() if value is not None}
        made = await gateway.send("POST", CAPS, body, {"org_id": org_id})
    per = "in total" if period == "total" else f"per {period}"
    kind = "refuses what is beyond" if made["hard"] else "refuses nothing"
    named = {
        "project": project,
        "key": scope["key_id"],
        "model": scope["model"],
        "tag": scope["tag"],
    }
    whom = ", ".join(f"{what} {name}" for what, name in named.items() if name is not None)
    whom = whom or (f"organization {org}" if org else "the key's organization")
    click.echo(f"{made['id']}: {to_money(made['amount_usd'])} USD {per} of {whom}; it {kind}.")


@budgets.command("remove", epilog=examples("tollgate budgets remove cap_0192"))
@with_gateway
@OTHER_ORG
@click.argument("cap_id")
async def remove(gateway: Gateway, cap_id: str, org: str | None) -> None:
    """Lift a budget, by its id or the ending that `list` shows of it."""
    org_id = await gateway.org_id(org)
    cap = one_of(await gateway.rows(CAPS, 100_000, org_id=org_id), cap_id, "budget")
    await gateway.send("POST", f"{CAPS}/{cap['id']}/archive", query={"org_id": org_id})
    click.echo(f"{cap['id']} is lifted.")


def one_of(rows: list[dict[str, Any]], named: str, what: str) -> dict[str, Any]:
    """Find the row with this id, this number, or an id of this ending. Raises: GatewayError."""
    ending = named.rpartition("…")[2]
    for row in rows:
        if named in (row["id"], row.get("number")):
            return row
    found = [row for row in rows if len(ending) >= 4 and row["id"].endswith(ending)]
    if len(found) == 1:
        return found[0]
    problem = f"{len(found)} end so" if found else "there is none"
    raise GatewayError(f"{what} {named!r}: {problem}; `list --wide` shows whole ids", status=2)


@click.command(epilog=examples("tollgate alerts", "tollgate alerts --limit 5 --json"))
@listing("/v1/admin/alerts", ALERT_COLUMNS, empty="Nothing was reached.", newest_first=True)
def alerts(_rows: list[dict[str, Any]]) -> None:
    """List the thresholds of budgets, credits and limits that were reached.

    The newest stand first.
    """


@click.command(epilog=examples("tollgate mails", "tollgate mails --wide"))
@listing(
    "/v1/admin/mail-deliveries", MAIL_COLUMNS, empty="Nobody was sent mail.", newest_first=True
)
def mails(_rows: list[dict[str, Any]]) -> None:
    """List the e-mails that tell people of events, and what became of each.

    The newest stand first. What an SMTP server refuses for good, or not at all within a day, is
    dead.
    """


def scope_of(row: Any) -> str:
    scope = row["scope"]
    return scope["id"] if "_" in scope["id"] else f"{scope['type']} {scope['id']}"


def quantity(value: Any) -> str:
    return to_money(value["value"]) if value["unit"] == "usd" else str(value["value"])
