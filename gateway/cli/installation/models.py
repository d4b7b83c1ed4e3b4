"""`tollgate models add`, `set` and `remove`: upstream models, in force without a restart.

They are stored in Postgres beside the settings file, whose names win: a model of the file is
changed there. A model that our engine runs stands in the file alone, with its folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import click

from gateway.cli.observe.status import models
from gateway.cli.shared.command import with_options
from gateway.cli.shared.stored import (
    ASSIGNMENTS,
    DRY_RUN,
    SETTINGS,
    dry_run_of,
    read_assignments,
    tell,
)
from gateway.cli.shared.target import Gateway, GatewayError, examples, with_gateway
from gateway.settings.load import MAX_SECRET_BYTES

__all__ = ["models"]

STORED = f"{SETTINGS}/models"
KEY_STDIN = click.option(
    "--key-stdin",
    is_flag=True,
    help="Read the upstreams' key from standard input: it is kept sealed and never shown again.",
)
UPSTREAM = click.option("--upstream", help="The base URL of the upstream, /v1 included.")


@models.command(
    epilog=examples(
        "tollgate models add gpt-5 --upstream https://api.openai.com/v1 --key-stdin < key",
        "tollgate models add big --upstream https://vllm.example/v1 context_window=32768",
        "tollgate models add big --upstream https://vllm.example/v1 --dry-run",
    )
)
@with_gateway
@with_options(UPSTREAM, KEY_STDIN, DRY_RUN)
@click.argument("name")
@ASSIGNMENTS
async def add(
    gateway: Gateway,
    name: str,
    assignments: tuple[str, ...],
    upstream: str | None,
    key_stdin: bool,
    dry_run: bool,
) -> None:
    """Add an upstream model.

    FIELD is one of a [[model]] of the settings file, VALUE as in TOML, or a word.
    """
    body: dict[str, Any] = {"name": name, "content": changed({}, upstream, assignments)}
    if key_stdin:
        body["api_key"] = read_key()
    try:
        made = await gateway.send("POST", STORED, body, dry_run_of(dry_run))
    except GatewayError as error:
        if error.code != "name_taken":
            raise
        raise GatewayError(
            f"name: there is a model {name!r} already; `tollgate models set` changes it,"
            " `tollgate models remove` removes it",
            status=2,
        ) from None
    await tell(gateway, made, f"{name} is added and served.", is_dry_run=dry_run)


@models.command(
    "set",
    epilog=examples(
        "tollgate models set big max_concurrency=64",
        "tollgate models set big --upstream https://other.example/v1 --key-stdin < key",
        "tollgate models set big context_window= --dry-run",
    ),
)
@with_gateway
@with_options(UPSTREAM, KEY_STDIN, DRY_RUN)
@click.option("--no-key", is_flag=True, help="Forget the upstreams' key.")
@click.argument("name")
@ASSIGNMENTS
async def set_(
    gateway: Gateway,
    name: str,
    assignments: tuple[str, ...],
    upstream: str | None,
    key_stdin: bool,
    no_key: bool,
    dry_run: bool,
) -> None:
    """Change fields of a model that was added; nothing behind the = takes one away.

    Refused if somebody else changed the model meanwhile. A key stays, unless the upstream lies
    elsewhere.
    """
    if not (assignments or upstream or key_stdin or no_key) or (key_stdin and no_key):
        raise click.UsageError(
            "name what to change: FIELD=VALUE, --upstream, --key-stdin, --no-key"
        )
    path = f"{STORED}/{quote(name)}"
    found = await gateway.get(path)
    body: dict[str, Any] = {"content": changed(found["content"], upstream, assignments)}
    if key_stdin or no_key:
        body["api_key"] = read_key() if key_stdin else None
    made = await gateway.send("PUT", path, body, dry_run_of(dry_run), if_match=gateway.last_etag)
    await tell(gateway, made, f"{name} is changed.", is_dry_run=dry_run)


@models.command(
    epilog=examples("tollgate models remove big", "tollgate models remove big --dry-run")
)
@with_gateway
@with_options(DRY_RUN)
@click.argument("name")
async def remove(gateway: Gateway, name: str, dry_run: bool) -> None:
    """Remove a model that was added; what it generates is ended first."""
    gone = await gateway.send("DELETE", f"{STORED}/{quote(name)}", query=dry_run_of(dry_run))
    await tell(gateway, gone, f"{name} is removed.", is_dry_run=dry_run)


def changed(
    content: dict[str, Any], upstream: str | None, assignments: Sequence[str]
) -> dict[str, Any]:
    """Return a model's table with other fields. Raises: GatewayError."""
    given = {} if upstream is None else {"upstream": upstream}
    found = content | given | read_assignments(assignments)
    return {field: value for field, value in found.items() if value is not None}


def read_key() -> str:
    """Read the only line of standard input. Raises: GatewayError."""
    key = sys.stdin.read(MAX_SECRET_BYTES + 1).strip()
    if not key or len(key) > MAX_SECRET_BYTES or not (key.isascii() and key.isprintable()):
        raise GatewayError("--key-stdin: give the key as one line on standard input", status=2)
    return key
