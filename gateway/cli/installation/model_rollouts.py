"""`tollgate models rollout`: a version on its way to everybody, and back at once if it is worse."""

from __future__ import annotations

from typing import Any

import click

from foundation.periods import to_minute
from gateway.cli.installation.model_versions import models, of_model
from gateway.cli.shared.command import with_options
from gateway.cli.shared.tables import Column, Output, show, with_output
from gateway.cli.shared.target import ROWS, Gateway, GatewayError, examples, with_gateway

__all__ = ["models"]

ROLLOUTS = "/v1/admin/models/rollouts"
ACTIVE = ("running", "paused")
COLUMNS = (
    Column("MODEL", "model"),
    Column("TO", "to_version", "number"),
    Column("STATE", "state", show=lambda row: row["state"].replace("_", " ")),
    Column("SHARE", "share", "number", show=lambda row: f"{row['share']}%"),
    Column("NEW", "new", "number", show=lambda row: str(row["new"]["requests"])),
    Column("OLD", "old", "number", show=lambda row: str(row["old"]["requests"])),
    Column("PROOF", "part_of_proof", "number", show=lambda row: f"{row['part_of_proof']:.0%}"),
    Column("REASON", "reason", gives_way=True),
    Column(
        "CREATED", "created_at", "time", gives_way=True, show=lambda r: to_minute(r["created_at"])
    ),
    Column("ID", "id", "id", gives_way=True),
)


class Percentage(click.ParamType[int]):
    """A whole percentage, such as `5%` or `5`."""

    name = "percentage"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        digits = str(value).removesuffix("%").strip()
        if not digits.isascii() or not digits.isdigit() or not 1 <= int(digits) <= 100:
            self.fail(f"{value!r} is not a whole percentage from 1% to 100%", param, ctx)
        return int(digits)


HOW = (
    click.option(
        "--share",
        "steps",
        type=Percentage(),
        multiple=True,
        default=("5%",),
        show_default=True,
        help="Share of the organizations that get it; several: one step after the other.",
    ),
    click.option(
        "--at-least",
        type=click.IntRange(1),
        default=500,
        show_default=True,
        help="A step lasts until so many requests of either version have ended.",
    ),
    click.option(
        "--watch",
        type=click.IntRange(0),
        default=500,
        show_default=True,
        help="Requests of the first organizations that are watched before the first step.",
    ),
)


@models.group(
    "rollout",
    epilog=examples(
        "tollgate models rollout start qwen --to 2 --share 5%",
        "tollgate models rollout status qwen",
        "tollgate models rollout complete qwen",
    ),
)
def rollout() -> None:
    """Give a version of a model to a share of the organizations, and take it back if it is worse.

    Its requests are compared with those of the version before all the time: refusals, errors,
    empty and cut off answers, and those that miss their objective of latency.
    """


@rollout.command(
    epilog=examples(
        "tollgate models rollout start qwen --to 2 --share 5%",
        "tollgate models rollout start qwen --to 2 --share 5% --share 25% --share 100%",
    )
)
@with_gateway
@with_options(*HOW)
@click.option("--to", "version", type=int, required=True, help="Number of the version.")
@click.argument("model")
async def start(gateway: Gateway, model: str, version: int, **how: Any) -> None:
    """Begin a rollout of MODEL.

    The last share stays until `complete`; 100% completes it by itself.
    """
    body = {"model": model, "version": version, **how, "steps": list(how["steps"])}
    made = await gateway.send("POST", ROLLOUTS, body)
    first = f"{made['steps'][0]}% of the organizations"
    then = f"get it after {made['watch']} of their requests" if made["watch"] else "get it now"
    click.echo(
        f"Version {version} of {model} is on its way, from version {made['from_version']}:"
        f" {first} {then}."
    )


@rollout.command(
    epilog=examples("tollgate models rollout status", "tollgate models rollout status qwen --json")
)
@with_gateway
@with_output
@ROWS
@click.argument("model", required=False)
async def status(gateway: Gateway, rows: int, output: Output, model: str | None) -> None:
    """Show the rollouts of MODEL, or of all models, and what was seen of them."""
    found = await gateway.rows(ROLLOUTS, rows, **of_model(model))
    show(found, COLUMNS, output, empty="There is no rollout.")


@rollout.command(epilog=examples("tollgate models rollout pause qwen"))
@with_gateway
@click.argument("model")
async def pause(gateway: Gateway, model: str) -> None:
    """Keep the share as it is. A version that is worse is taken back all the same."""
    await act(gateway, model, "pause", "stays at {share}% of the organizations")


@rollout.command(epilog=examples("tollgate models rollout resume qwen"))
@with_gateway
@click.argument("model")
async def resume(gateway: Gateway, model: str) -> None:
    """Let a paused rollout go on."""
    await act(gateway, model, "resume", "goes on from {share}% of the organizations")


@rollout.command(epilog=examples("tollgate models rollout abort qwen"))
@with_gateway
@click.argument("model")
async def abort(gateway: Gateway, model: str) -> None:
    """Give everybody the version before."""
    await act(gateway, model, "abort", "is nobody's any more; all have version {from_version}")


@rollout.command(epilog=examples("tollgate models rollout complete qwen"))
@with_gateway
@click.argument("model")
async def complete(gateway: Gateway, model: str) -> None:
    """Give everybody the new version, as a pin of all does."""
    await act(gateway, model, "complete", "is everybody's")


async def act(gateway: Gateway, model: str, what: str, said: str) -> None:
    """Change the rollout of a model that is under way. Raises: GatewayError."""
    after: dict[str, str] = {}
    while True:
        page = await gateway.get(ROLLOUTS, model=model, limit="100", order="desc", **after)
        for row in page["data"]:
            if row["state"] in ACTIVE:
                done = await gateway.send("POST", f"{ROLLOUTS}/{row['id']}/{what}")
                click.echo(f"Version {done['to_version']} of {model} {said.format(**done)}.")
                return
        if not page["has_more"]:
            raise GatewayError(f"no rollout of {model} is under way", status=2)
        after = {"after": page["last_id"]}
