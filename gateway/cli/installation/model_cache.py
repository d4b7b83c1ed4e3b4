"""`tollgate models fetch`, and `models cache list` and `remove`: the cache of models on this
machine, which `[model_cache]` of the settings names. They ask no gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from typing import TypeVar

import click
import msgspec

from engine.errors import ConfigError
from gateway.cli.installation.model_evaluations import models
from gateway.cli.shared.command import with_settings
from gateway.cli.shared.tables import Column, Output, show, with_output
from gateway.cli.shared.target import examples
from gateway.settings.file import SettingsError
from gateway.settings.load import Settings

__all__ = ["models"]

T = TypeVar("T")
MEGABYTE = 1_000_000
VERSION_CHARS = len("sha256:") + 12
COLUMNS = (
    Column("VERSION", "version", show=lambda row: row["version"] or "(not whole)"),
    Column("SOURCE", "source"),
    Column("PART", "part", gives_way=True),
    Column("MB", "size", "number", show=lambda row: f"{row['size'] / MEGABYTE:,.1f}"),
    Column("IN USE", "in_use", show=lambda row: "yes" if row["in_use"] else "no"),
    Column(
        "USED",
        "used_at",
        "time",
        gives_way=True,
        show=lambda row: f"{datetime.fromtimestamp(row['used_at']):%Y-%m-%d %H:%M}",
    ),
)


@models.command(
    epilog=examples(
        "tollgate models fetch hf:Qwen/Qwen3-8B@main",
        "tollgate models fetch s3://models/legal --adapter",
    )
)
@with_settings
@click.argument("source")
@click.option("--version", help="Refuse it unless it is this version, sha256:...")
@click.option("--adapter", is_flag=True, help="It is a LoRA adapter.")
async def fetch(settings: Settings, source: str, version: str | None, adapter: bool) -> None:
    """Fetch SOURCE, hf:ORG/NAME@REVISION or s3://BUCKET/PREFIX, into this machine's cache.

    Says its version, which `[[model]] version` may name. A start that serves it downloads nothing.
    """
    from engine.model_cache.sources import parse_source
    from engine.text.hub import LineOnTerminal
    from gateway.processes.models.model_cache import open_cache

    def bring() -> tuple[str, str]:
        found = open_cache(settings).fetch(
            parse_source(source),
            LineOnTerminal(source),
            part="adapter" if adapter else "model",
            version=version,
        )
        found.hold.close()
        return found.version, str(found.folder)

    made, folder = await on_the_disk(bring)
    click.echo(f"{source} is version {made}, in {folder}.")


@models.group("cache", epilog=examples("tollgate models cache list"))
def cache() -> None:
    """Show and remove models of this machine's cache."""


@cache.command(
    "list", epilog=examples("tollgate models cache list", "tollgate models cache list --json")
)
@with_settings
@with_output
async def list_cache(settings: Settings, output: Output) -> None:
    """List what the cache has, what gives way first at the top."""
    from gateway.processes.models.model_cache import open_cache

    found = await on_the_disk(open_cache(settings).entries)
    rows = [msgspec.to_builtins(each) for each in found]
    if output.form == "table" and not output.wide:
        rows = [row | {"version": row["version"][:VERSION_CHARS]} for row in rows]
    show(rows, COLUMNS, output, empty="The cache is empty.")


@cache.command("remove", epilog=examples("tollgate models cache remove sha256:4be2d29a81c0"))
@with_settings
@click.argument("version")
async def remove(settings: Settings, version: str) -> None:
    """Remove a model that no process uses, by its version or the beginning of it."""
    from gateway.processes.models.model_cache import open_cache

    found = open_cache(settings)

    def take_away() -> tuple[str, int]:
        whole = [each.version for each in found.entries() if each.version]
        fitting = [each for each in whole if each.startswith(version)]
        if len(fitting) != 1:
            number = len(fitting) or "no"
            raise ConfigError(f"the cache has {number} versions that begin with {version!r}")
        return fitting[0], found.remove(fitting[0])

    removed, size = await on_the_disk(take_away)
    click.echo(f"{removed} is removed: {size / MEGABYTE:,.1f} MB.")


async def on_the_disk(work: Callable[[], T]) -> T:
    """Run what blocks. Raises: SettingsError."""
    try:
        return await asyncio.to_thread(work)
    except ConfigError as error:
        raise SettingsError(error.message) from None
