"""`tollgate fleet token`: what lets engines of other machines join, asked over HTTP."""

from __future__ import annotations

from urllib.parse import quote

import click

from foundation.periods import to_minute
from gateway.cli.shared.tables import Column, Output, show, with_output
from gateway.cli.shared.target import ROWS, Gateway, examples, with_gateway

PATH = "/v1/admin/join_tokens"
COLUMNS = (
    Column("ID", "id"),
    Column("MODEL", "model", show=lambda row: row["model"] or f"those of cell {row['cell']}"),
    Column("STATE", "state"),
    Column("JOINED", "engines", show=lambda row: f"{len(row['engines'])} of {row['uses']}"),
    Column("EXPIRES", "expires_at", "time", show=lambda row: to_minute(row["expires_at"])),
    Column(
        "ENGINES",
        "engines",
        gives_way=True,
        show=lambda row: ", ".join(f"{e['replica'] or '-'} on {e['host']}" for e in row["engines"]),
    ),
)


@click.group(
    epilog=examples(
        "tollgate fleet token create --model penny > join.token", "tollgate fleet token list"
    )
)
def token() -> None:
    """Let engines of other machines join a model (docs/how-to/many-machines.md)."""


@token.command(
    epilog=examples(
        "tollgate fleet token create --model penny > join.token",
        "tollgate fleet token create --model penny --uses 8 --expires-in-s 86400",
        "tollgate fleet token create --cell us-1 --uses 8 > us-1.token",
    )
)
@with_gateway
@click.option("--model", help="The model that engines may join.")
@click.option("--cell", help="In its place: the other cell that may lend its engines.")
@click.option("--uses", type=int, default=1, help="So many engines may join by it. Default: 1.")
@click.option(
    "--expires-in-s", type=int, default=3600, help="How long it lets engines in. Default: 3600."
)
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON.")
async def create(
    gateway: Gateway,
    model: str | None,
    cell: str | None,
    uses: int,
    expires_in_s: int,
    as_json: bool,
) -> None:
    """Make a token and print it, this once.

    Put it into a file on the other machine, readable by its user alone, and run there
    `tollgate engine --join HOST:PORT --token FILE`. It is for the first join; from then on the
    gateway knows the engine by a certificate. The token of a cell is for the `token_file` of that
    cell's settings (docs/how-to/cells.md).
    """
    if (model is None) == (cell is None):
        raise click.UsageError("give either --model NAME or --cell NAME")
    who = {"model": model} if cell is None else {"cell": cell}
    body = {**who, "uses": uses, "expires_in_s": expires_in_s}
    made = await gateway.send("POST", PATH, body)
    if as_json:
        show([made], COLUMNS, Output("json", True))
        return
    click.echo(made["token"])
    until = f"{to_minute(made['expires_at'])} UTC"
    engines = "one engine" if uses == 1 else f"{uses} engines"
    where = f"join {model}" if cell is None else f"of cell {cell} be lent to this one"
    click.echo(f"{made['id']}: lets {engines} {where} until {until}.", err=True)


@token.command(
    "list", epilog=examples("tollgate fleet token list", "tollgate fleet token list --json")
)
@with_gateway
@with_output
@ROWS
async def list_(gateway: Gateway, rows: int, output: Output) -> None:
    """Show the tokens of the home whose gateway answers, and who joined by them."""
    show(await gateway.rows(PATH, rows), COLUMNS, output, empty="No token was made here.")


@token.command(epilog=examples("tollgate fleet token revoke join_0123456789abcdef"))
@with_gateway
@click.argument("token_id")
async def revoke(gateway: Gateway, token_id: str) -> None:
    """Let nobody in by a token any more, and turn out who joined by it.

    Their streams go on with other engines, as after a death.
    """
    found = await gateway.send("POST", f"{PATH}/{quote(token_id, safe='')}/revoke")
    click.echo(f"{found['id']} is revoked; {len(found['engines'])} had joined by it.")
