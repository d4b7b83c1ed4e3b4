"""`tollgate deadlines`: how long requests of each lane may take to their first token, in force
without a restart. A lane that the settings file gives a deadline is changed there.
"""

from __future__ import annotations

from typing import Any

import click

from gateway.cli.shared.command import with_options
from gateway.cli.shared.stored import DRY_RUN, SETTINGS, dry_run_of, tell
from gateway.cli.shared.tables import Column, Output, show, with_output
from gateway.cli.shared.target import Gateway, GatewayError, examples, with_gateway
from gateway.settings.load import LANES

STORED = f"{SETTINGS}/deadlines"
LANE = click.argument("lane", type=click.Choice(LANES))
COLUMNS = (
    Column("LANE", "lane"),
    Column("SECONDS", "seconds", "number", show=lambda row: seconds_of(row["seconds"])),
    Column("FROM", "source"),
)


@click.group()
def deadlines() -> None:
    """Show the deadlines of the lanes, and change them."""


@deadlines.command("list", epilog=examples("tollgate deadlines list"))
@with_gateway
@with_output
async def list_(gateway: Gateway, output: Output) -> None:
    """List the seconds to the first token by lane, and where each comes from.

    `stored`: set by this command or by API; `settings`: from the file, or the default.
    """
    in_force = (await gateway.get(SETTINGS))["deadlines"]
    stored = {each["id"]: each for each in await gateway.rows(STORED, len(LANES))}
    rows = [
        {
            "lane": lane,
            "seconds": in_force[lane],
            "source": "settings" if stored.get(lane, {"hidden": True})["hidden"] else "stored",
        }
        for lane in LANES
    ]
    show(rows, COLUMNS, output)


@deadlines.command(
    "set",
    epilog=examples("tollgate deadlines set interactive 30", "tollgate deadlines set batch none"),
)
@with_gateway
@with_options(DRY_RUN)
@LANE
@click.argument("seconds")
async def set_(gateway: Gateway, lane: str, seconds: str, dry_run: bool) -> None:
    """Set the SECONDS to the first token in a LANE; `none`: as it comes.

    A request that would miss it is refused at once.
    """
    content = {"seconds": read_seconds(seconds)}
    path = f"{STORED}/{lane}"
    try:
        await gateway.get(path)
    except GatewayError as error:
        if error.http_status != 404:
            raise
        body: dict[str, Any] = {"name": lane, "content": content}
        made = await gateway.send("POST", STORED, body, dry_run_of(dry_run))
    else:
        made = await gateway.send(
            "PUT", path, {"content": content}, dry_run_of(dry_run), if_match=gateway.last_etag
        )
    await tell(gateway, made, f"{lane}: {seconds_of(content['seconds'])} s.", is_dry_run=dry_run)


@deadlines.command(epilog=examples("tollgate deadlines remove interactive"))
@with_gateway
@with_options(DRY_RUN)
@LANE
async def remove(gateway: Gateway, lane: str, dry_run: bool) -> None:
    """Forget what was set for a LANE: that of the settings is in force again."""
    gone = await gateway.send("DELETE", f"{STORED}/{lane}", query=dry_run_of(dry_run))
    await tell(gateway, gone, f"{lane} has the deadline of the settings.", is_dry_run=dry_run)


def read_seconds(text: str) -> float | None:
    """Raises: GatewayError."""
    if text == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise GatewayError(f"seconds: {text}: give a number, or none", status=2) from None


def seconds_of(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
