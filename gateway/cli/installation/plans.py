"""`tollgate plans` and `webhooks`: changes what all keys of a plan may use, and where an
organization's events are sent. Both are in force without a restart."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from gateway.cli.shared.listing import listing
from gateway.cli.shared.stored import ASSIGNMENTS, read_assignments
from gateway.cli.shared.tables import Column
from gateway.cli.shared.target import Gateway, GatewayError, examples, with_gateway

PLANS, WEBHOOKS = "/v1/admin/plans", "/v1/admin/webhooks"
NOT_LIMITS = ("object", "name", "read_only", "created_at", "archived_at")
PLAN_COLUMNS = (
    Column("PLAN", "name"),
    Column("FROM", "from"),
    Column("LIMITS", "limits", gives_way=True),
)
WEBHOOK_COLUMNS = (
    Column("ID", "id"),
    Column("URL", "url", gives_way=True),
    Column("EVENTS", "event_types", gives_way=True, show=lambda row: " ".join(row["event_types"])),
    Column("ENABLED", "enabled"),
)


@click.group(epilog=examples("tollgate plans list", "tollgate plans set team"))
def plans() -> None:
    """Show and change plans: named limits of keys, projects and organizations."""


@plans.command("list", epilog=examples("tollgate plans list", "tollgate plans list --json"))
@listing(PLANS, PLAN_COLUMNS, empty="There is no plan.")
def list_plans(rows: list[dict[str, Any]]) -> None:
    """List the plans and their limits."""
    for each in rows:
        limits = (f"{k}={v}" for k, v in each.items() if k not in NOT_LIMITS and v is not None)
        each["limits"] = " ".join(limits)
        each["from"] = "file" if each["read_only"] else "database"


@plans.command(
    "set",
    epilog=examples(
        "tollgate plans set team tokens_per_minute=200000 requests_per_minute=600",
        "tollgate plans set team requests_per_minute=",
    ),
)
@with_gateway
@click.argument("name")
@ASSIGNMENTS
async def set_plan(gateway: Gateway, name: str, assignments: tuple[str, ...]) -> None:
    """Make a plan, or change limits of one; nothing behind the = lifts one.

    A plan of the settings file is changed there. Workers go by it within a second.
    """
    wanted = read_assignments(assignments)
    path = f"{PLANS}/{quote(name)}"
    try:
        await gateway.get(path)
    except GatewayError as error:
        if error.http_status != 404:
            raise
        given = {field: value for field, value in wanted.items() if value is not None}
        await gateway.send("POST", PLANS, {"name": name, **given})
        click.echo(f"The plan {name} is made.")
        return
    await gateway.send("PATCH", path, wanted, if_match=gateway.last_etag)
    click.echo(f"The plan {name} is changed.")


@plans.command("archive", epilog=examples("tollgate plans archive team"))
@with_gateway
@click.argument("name")
async def archive_plan(gateway: Gateway, name: str) -> None:
    """Archive a plan: who has it keeps it, and nobody is given it any more."""
    await gateway.send("POST", f"{PLANS}/{quote(name)}/archive")
    click.echo(f"The plan {name} is archived.")


@click.group(epilog=examples("tollgate webhooks list"))
def webhooks() -> None:
    """Show and change where an organization's events are sent."""


@webhooks.command("list", epilog=examples("tollgate webhooks list", "tollgate webhooks list --csv"))
@listing(WEBHOOKS, WEBHOOK_COLUMNS, empty="Events are sent nowhere.")
def list_webhooks(_rows: list[dict[str, Any]]) -> None:
    """List the endpoints."""


@webhooks.command(
    "add",
    epilog=examples(
        "tollgate webhooks add https://hooks.example.com/in --event credits.low",
    ),
)
@with_gateway
@click.option(
    "--event", "events", multiple=True, required=True, help="Send this type of event; repeatable."
)
@click.argument("place")
async def add_webhook(gateway: Gateway, place: str, events: tuple[str, ...]) -> None:
    """Send events to the URL PLACE. Shows the secret that signs them, this once."""
    body: dict[str, Any] = {"url": place, "event_types": list(events)}
    made = await gateway.send("POST", WEBHOOKS, body)
    click.echo(f"{made['id']} is told; what it is sent is signed with {made['secret']}")


@webhooks.command("remove", epilog=examples("tollgate webhooks remove whep_0192"))
@with_gateway
@click.argument("endpoint_id")
async def remove_webhook(gateway: Gateway, endpoint_id: str) -> None:
    """Send an endpoint no events any more."""
    await gateway.send("POST", f"{WEBHOOKS}/{quote(endpoint_id)}/archive")
    click.echo(f"{endpoint_id} is told no more.")
