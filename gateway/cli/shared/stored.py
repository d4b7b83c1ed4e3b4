"""The parts of commands that change stored settings over the API: what would change, and whether it
is in force."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Sequence
from typing import Any

import click

from gateway.cli.shared.target import Gateway, GatewayError

SETTINGS = "/v1/admin/settings"
LOOK_AGAIN_S = 0.1
IN_FORCE_TIMEOUT_S = 30.0
ASSIGNMENTS = click.argument("assignments", nargs=-1, metavar="[FIELD=VALUE]...")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Check it, and say what would change.")


def dry_run_of(is_dry_run: bool) -> dict[str, str]:
    return {"dry_run": "true"} if is_dry_run else {}


def show_changes(changes: Sequence[str], *, is_dry_run: bool) -> None:
    for line in changes:
        click.echo(line)
    if is_dry_run:
        click.echo("Nothing is stored." if changes else "Nothing would change.")


async def tell(gateway: Gateway, made: dict[str, Any], line: str, *, is_dry_run: bool) -> None:
    """Show what a change alters, and wait until it is in force. Raises: GatewayError."""
    show_changes(made["changes"], is_dry_run=is_dry_run)
    if not is_dry_run:
        await until_in_force(gateway)
        click.echo(line)


def read_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Return fields by their names; None: nothing stands behind the =. Raises: GatewayError."""
    found: dict[str, Any] = {}
    for each in assignments:
        field, equals, text = each.partition("=")
        if not equals or not field:
            raise GatewayError(f"{each}: give FIELD=VALUE", status=2)
        found[field] = value_of(text) if text else None
    return found


def value_of(text: str) -> Any:
    """Return a value as TOML has it; what is none is a string."""
    try:
        found = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return found["value"] if len(found) == 1 else text


async def until_in_force(gateway: Gateway) -> None:
    """Wait until each running home has what is stored in force. Raises: GatewayError, if one
    refuses it."""
    try:
        async with asyncio.timeout(IN_FORCE_TIMEOUT_S):
            while True:
                homes = (await gateway.get(SETTINGS))["homes"]
                for each in homes:
                    if each["problem"] is not None:
                        where = f"stored, but not in force in {each['home']}"
                        raise GatewayError(f"{where}: {each['problem']}", status=1)
                if homes and all(each["in_force"] for each in homes):
                    return
                await asyncio.sleep(LOOK_AGAIN_S)
    except TimeoutError:
        raise GatewayError(
            "stored, but no `tollgate up` has it in force yet: see `tollgate status`", status=1
        ) from None
