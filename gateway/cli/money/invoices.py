"""`tollgate invoices`: what organizations are asked to pay, and the documents for it."""

from __future__ import annotations

from pathlib import Path

import click

from gateway.cli.money.budgets import one_of
from gateway.cli.shared.tables import Column, Output, show, to_money, with_output
from gateway.cli.shared.target import OTHER_ORG, ROWS, Gateway, examples, with_gateway
from gateway.cli.shared.times import to_day

INVOICES = "/v1/admin/invoices"
FILE = click.Path(path_type=Path, dir_okay=False)
NONE_YET = "There is no invoice yet: an organization with a billing account gets one each month."
FORMATS = ("pdf", "csv", "json", "tags", "focus", "parquet", "beancount", "hledger")
ENDINGS = {"tags": "tags.csv", "focus": "focus.csv", "hledger": "journal"}
COLUMNS = (
    Column("ID", "id", "id"),
    Column("NUMBER", "number"),
    Column("STATE", "state"),
    Column("FROM", "period_start", "time", show=lambda row: to_day(row["period_start"])),
    Column("TO", "period_end", "time", show=lambda row: to_day(row["period_end"])),
    Column("TOTAL", "total", "number"),
    Column("DUE", "due", "number"),
    Column("CUR", "currency", gives_way=True),
    Column("EXACT USD", "exact_usd", "number", True, lambda row: to_money(row["exact_usd"])),
    Column("DUE BY", "due_at", "time", True, lambda row: to_day(row["due_at"])),
)


@click.group(epilog=examples("tollgate invoices list", "tollgate invoices get TG-000001"))
def invoices() -> None:
    """Show invoices, and write their documents."""


@invoices.command(
    "list", epilog=examples("tollgate invoices list", "tollgate invoices list --org acme --json")
)
@with_gateway
@with_output
@ROWS
@OTHER_ORG
async def list_(gateway: Gateway, org: str | None, rows: int, output: Output) -> None:
    """List the invoices of an organization, newest first."""
    org_id = await gateway.org_id(org)
    found = await gateway.rows(INVOICES, rows, org_id=org_id, order="desc")
    show(found, COLUMNS, output, empty=NONE_YET)


@invoices.command(
    epilog=examples(
        "tollgate invoices get TG-000001", "tollgate invoices get inv_0192 --format csv"
    )
)
@with_gateway
@click.option(
    *("--format", "form"),
    type=click.Choice(FORMATS),
    default="pdf",
    show_default=True,
    help="The form of the document.",
)
@click.option(
    *("-o", "--output", "path"), type=FILE, help="Write it here. Default: NUMBER.FORMAT, here."
)
@OTHER_ORG
@click.argument("invoice")
async def get(
    gateway: Gateway, invoice: str, org: str | None, form: str, path: Path | None
) -> None:
    """Write a final invoice to a file, by its number, its id or the ending that `list` shows."""
    path, size = await write_document(gateway, invoice, await gateway.org_id(org), form, path)
    click.echo(f"{path}: {size} bytes")


async def write_document(
    gateway: Gateway, invoice: str, org_id: str | None, form: str, path: Path | None
) -> tuple[Path, int]:
    """Return the file and its size in bytes. Raises: GatewayError, OSError."""
    found = one_of(await gateway.rows(INVOICES, 100_000, org_id=org_id), invoice, "invoice")
    query = {"org_id": org_id, "format": form}
    content = await gateway.fetch("GET", f"{INVOICES}/{found['id']}/export", query=query)
    name = str(found["number"]).replace("/", "-")
    path = path or Path(f"{name}.{ENDINGS.get(form, form)}")
    path.write_bytes(content)
    return path, len(content)
