"""`tollgate status` and `tollgate models list`: how an installation and its models are, asked over
HTTP as any operator would."""

from __future__ import annotations

import sys
from typing import Any

import click

from foundation.periods import to_minute
from gateway.cli.shared.tables import Column, Output, show, with_output
from gateway.cli.shared.target import (
    ROWS,
    Gateway,
    GatewayError,
    GatewayTarget,
    examples,
    open_gateway,
    unreachable,
    with_gateway,
    with_target,
)
from gateway.settings.load import Settings

EXIT_UNREADY = 1
COLUMNS = (
    Column("KIND", "kind"),
    Column("NAME", "name"),
    Column("STATE", "state"),
    Column("SINCE", "since", "time", gives_way=True, show=lambda row: to_minute(row.get("since"))),
    Column("DETAIL", "detail", show=lambda row: detail_of(row)),
)


MODEL_COLUMNS = (
    Column("MODEL", "model"),
    Column("KIND", "kind"),
    Column("STATE", "state"),
    Column("RUNNING", "num_running", "number"),
    Column("WAITING", "num_waiting", "number"),
    Column("REPLICA", "name", gives_way=True),
    Column("SINCE", "since", "time", gives_way=True, show=lambda row: to_minute(row["since"])),
    Column("LAST ERROR", "last_error", gives_way=True),
)


@click.command(epilog=examples("tollgate status", "tollgate status --url http://127.0.0.1:8000"))
@with_target
@with_output
async def status(_settings: Settings, target: GatewayTarget, output: Output) -> None:
    """Show the health of spool, databases, engines and upstreams.

    With an admin key, what went wrong is shown too. Exit code: 0 ready or degraded, 1 not ready or
    not reachable.
    """
    found = await ask(target)
    if output.form == "json":
        show([found], (), output)
    else:
        parts = found.get("components", found.get("degraded", []))
        if output.form == "table":
            missing = f": it lacks {', '.join(found['missing'])}" if found["missing"] else ""
            click.echo(f"{found['status']}{missing}")
        if parts or output.form == "csv":
            show(parts, COLUMNS, output)
    if found["status"] == "unready":
        sys.exit(EXIT_UNREADY)


async def ask(target: GatewayTarget) -> dict[str, Any]:
    """Return what the gateway says: all of it to an operator, else what it tells everybody.

    Raises: GatewayError.
    """
    import httpx  # not for `--help`

    async with open_gateway(target) as gateway:
        if target.key is not None:
            try:
                return await gateway.get("/v1/admin/health")
            except GatewayError as error:
                if error.is_unreachable:
                    raise
                click.echo(f"Parts are shown to operators alone: {error}", err=True)
        try:
            async with httpx.AsyncClient(base_url=target.base, trust_env=False) as http:
                return dict((await http.get("/health/ready")).json())
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise unreachable(target, error) from None


def detail_of(row: Any) -> str:
    said = [row.get("detail"), last_error(row)]
    return "; ".join(filter(None, said)) or "-"


def last_error(part: Any) -> str | None:
    if part.get("last_error") is None:
        return None
    return f"last error: {part['last_error']} ({to_minute(part.get('last_error_at'))})"


@click.group(epilog=examples("tollgate models list", "tollgate models list --json"))
def models() -> None:
    """Show the models that are served, and add, change and remove upstream models."""


@models.command("list", epilog=examples("tollgate models list", "tollgate models list --wide"))
@with_gateway
@with_output
@ROWS
async def list_(gateway: Gateway, rows: int, output: Output) -> None:
    """List the models that are served, with a row for each replica.

    What runs and waits is of the worker that answers.
    """
    found = await gateway.rows("/v1/admin/models", rows)
    if output.form == "json":
        show(found, MODEL_COLUMNS, output)
    else:
        show(replicas_of(found), MODEL_COLUMNS, output, empty="No model is served.")


def replicas_of(models: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**replica, "model": model["id"], "kind": model["kind"]}
        for model in models
        for replica in model["replicas"]
    ]
