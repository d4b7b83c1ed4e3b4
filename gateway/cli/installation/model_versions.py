"""`tollgate models versions`, `pin` and `unpin`: which versions a model has, and who gets which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from foundation.periods import to_minute
from gateway.cli.installation.models import models
from gateway.cli.shared.command import with_options
from gateway.cli.shared.tables import Column, Output, show, with_output
from gateway.cli.shared.target import ROWS, Gateway, GatewayError, examples, with_gateway

__all__ = ["models"]

VERSIONS, PINS = "/v1/admin/models/versions", "/v1/admin/models/pins"
SHOWN_DIGITS = 12
ALL = "all"
VERSION_COLUMNS = (
    Column("MODEL", "model"),
    Column("VERSION", "version", "number"),
    Column("SERVED BY", "served_by"),
    Column("SERVES", "serves", show=lambda row: "yes" if row["serves"] else "no"),
    Column("DIGEST", "digest", show=lambda row: row["digest"][:SHOWN_DIGITS]),
    Column(
        "CREATED", "created_at", "time", gives_way=True, show=lambda r: to_minute(r["created_at"])
    ),
    Column("ID", "id", "id", gives_way=True),
)
PIN_COLUMNS = (
    Column("MODEL", "model"),
    Column("VERSION", "version", "number"),
    Column("WHO", "scope_id", show=lambda row: row["scope_id"] or ALL),
    Column(
        "CREATED", "created_at", "time", gives_way=True, show=lambda r: to_minute(r["created_at"])
    ),
    Column("ID", "id", "id", gives_way=True),
)
WHO = (
    click.option("--org", help="Id of an organization."),
    click.option("--project", help="Id of a project."),
    click.option("--key-id", help="Id of a key."),
    click.option("--all", "everybody", is_flag=True, help="Pin whoever has no pin that is nearer."),
)


@models.group(
    "versions",
    epilog=examples(
        "tollgate models versions list qwen", "tollgate models versions add qwen qwen-next"
    ),
)
def versions() -> None:
    """Show, register and forget versions of a model: other served models that answer in its name.

    Requests keep the name and the price of the model that they ask for.
    """


@versions.command(
    "list", epilog=examples("tollgate models versions list", "tollgate models versions list qwen")
)
@with_gateway
@with_output
@ROWS
@click.argument("model", required=False)
async def list_versions(gateway: Gateway, rows: int, output: Output, model: str | None) -> None:
    """List the versions of MODEL, or of all models."""
    found = await gateway.rows(VERSIONS, rows, **of_model(model))
    show(found, VERSION_COLUMNS, output, empty="There is no version.")


@versions.command("add", epilog=examples("tollgate models versions add qwen qwen-next"))
@with_gateway
@click.argument("model")
@click.argument("served_by")
async def add_version(gateway: Gateway, model: str, served_by: str) -> None:
    """Register the served model SERVED_BY as the next version of MODEL, by its digest.

    The first version of a model is the model itself. Nobody gets another one before a pin or a
    rollout says so.
    """
    made = await gateway.send("POST", VERSIONS, {"model": model, "served_by": served_by})
    click.echo(
        f"{served_by} is version {made['version']} of {model},"
        f" digest {made['digest'][:SHOWN_DIGITS]}."
    )


@versions.command("remove", epilog=examples("tollgate models versions remove qwen 2"))
@with_gateway
@click.argument("model")
@click.argument("version", type=int)
async def remove_version(gateway: Gateway, model: str, version: int) -> None:
    """Forget a version that nobody is pinned to. The served model stays."""
    found = await find(gateway, VERSIONS, model, {"version": version}, f"version {version}")
    await gateway.send("DELETE", f"{VERSIONS}/{found['id']}")
    click.echo(f"Version {version} of {model} is forgotten.")


@models.command(
    epilog=examples(
        "tollgate models pin qwen 2 --org org_0192",
        "tollgate models pin qwen 1 --key-id key_0192",
        "tollgate models pin qwen 2 --all",
    )
)
@with_gateway
@with_options(*WHO)
@click.argument("model")
@click.argument("version", type=int)
async def pin(gateway: Gateway, model: str, version: int, **who: Any) -> None:
    """Pin an organization, a project, a key or all to VERSION of MODEL.

    The nearest pin counts: a key's before its project's before its organization's. Whoever is
    pinned stays out of rollouts.
    """
    scope, scope_id = scope_of(**who)
    body = {"model": model, "version": version, "scope": scope, "scope_id": scope_id}
    await gateway.send("POST", PINS, body)
    click.echo(f"{scope_id or 'Everybody'} gets version {version} of {model}.")


@models.command(epilog=examples("tollgate models unpin qwen --org org_0192"))
@with_gateway
@with_options(*WHO)
@click.argument("model")
async def unpin(gateway: Gateway, model: str, **who: Any) -> None:
    """Take a pin away."""
    scope, scope_id = scope_of(**who)
    wanted = {"scope": scope, "scope_id": scope_id}
    found = await find(gateway, PINS, model, wanted, f"pin of {scope_id or ALL}")
    await gateway.send("DELETE", f"{PINS}/{found['id']}")
    click.echo(f"{scope_id or 'Everybody'} is pinned to no version of {model}.")


@models.command(epilog=examples("tollgate models pins", "tollgate models pins qwen --json"))
@with_gateway
@with_output
@ROWS
@click.argument("model", required=False)
async def pins(gateway: Gateway, rows: int, output: Output, model: str | None) -> None:
    """List who is pinned to which version."""
    found = await gateway.rows(PINS, rows, **of_model(model))
    show(found, PIN_COLUMNS, output, empty="Nobody is pinned.")


def of_model(model: str | None) -> dict[str, str]:
    return {} if model is None else {"model": model}


def scope_of(
    *, org: str | None, project: str | None, key_id: str | None, everybody: bool
) -> tuple[str, str]:
    """Return the one scope that is named. Raises: click.UsageError."""
    given = {
        "org": org,
        "project": project,
        "key": key_id,
        "installation": "" if everybody else None,
    }
    named = [(scope, name) for scope, name in given.items() if name is not None]
    if len(named) != 1:
        raise click.UsageError("name one of --org, --project, --key-id and --all")
    return named[0]


async def find(
    gateway: Gateway, path: str, model: str, wanted: Mapping[str, Any], what: str
) -> dict[str, Any]:
    """Return the row of a model that has the wanted values. Raises: GatewayError."""
    after: dict[str, str] = {}
    while True:
        page = await gateway.get(path, model=model, limit="100", **after)
        for row in page["data"]:
            if all(row[name] == value for name, value in wanted.items()):
                return dict(row)
        if not page["has_more"]:
            raise GatewayError(f"{model} has no {what}", status=2)
        after = {"after": page["last_id"]}
