"""`tollgate credits`: what organizations have paid in advance."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from gateway.cli.shared.tables import Column, Output, show, to_money, with_output
from gateway.cli.shared.target import OTHER_ORG, ROWS, Gateway, examples, with_gateway
from gateway.cli.shared.times import to_day

DAY = click.DateTime(["%Y-%m-%d"])
COLUMNS = (
    Column("ID", "id", "id"),
    Column("CREATED", "created_at", "time", show=lambda row: to_day(row["created_at"])),
    Column("USD", "amount_usd", "number", show=lambda row: to_money(row["amount_usd"])),
    Column("LEFT", "left_usd", "number", show=lambda row: to_money(row["left_usd"])),
    Column("EXPIRES", "expires_at", "time", show=lambda row: to_day(row["expires_at"])),
    Column("PRIORITY", "priority", "number", gives_way=True),
    Column("MODELS", "models", gives_way=True),
)


@click.group(epilog=examples("tollgate credits list", "tollgate credits add acme 100"))
def credits() -> None:
    """Show and give what is paid in advance."""


@credits.command(
    "list", epilog=examples("tollgate credits list", "tollgate credits list --org acme")
)
@with_gateway
@with_output
@ROWS
@OTHER_ORG
async def list_(gateway: Gateway, org: str | None, rows: int, output: Output) -> None:
    """List the credits of an organization, and its balance."""
    org_id = await gateway.org_id(org)
    found = await gateway.rows("/v1/admin/credits", rows, org_id=org_id)
    show(found, COLUMNS, output, empty="There is no credit.")
    if output.form == "table":
        balance = await gateway.get("/v1/admin/balance", org_id=org_id)
        left, spent = to_money(balance["left_usd"]), to_money(balance["spent_usd"])
        bound = "no more is spent than that" if balance["prepaid"] else "more may be spent"
        click.echo(f"Left: {left} USD, {bound}. Spent: {spent} USD.")


@credits.command(
    epilog=examples(
        "tollgate credits add acme 100", "tollgate credits add acme 50 --expires 2027-01-01"
    )
)
@with_gateway
@click.argument("org")
@click.argument("usd")
@click.option("--expires", type=DAY, help="The first day on which it pays no more, UTC.")
async def add(gateway: Gateway, org: str, usd: str, expires: datetime | None) -> None:
    """Credit an organization, by its name or id, with what it has paid in advance, in USD."""
    org_id = await gateway.org_id(org)
    ends = None if expires is None else int(expires.replace(tzinfo=UTC).timestamp())
    body = {"org_id": org_id, "amount_usd": usd, "expires_at": ends}
    made = await gateway.send("POST", "/v1/admin/credits", body)
    click.echo(f"{made['id']}: {org} is credited with {to_money(made['amount_usd'])} USD.")
