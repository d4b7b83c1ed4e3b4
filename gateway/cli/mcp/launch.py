"""Pins the command of an MCP server that is a process, for `tollgate mcp add` and `approve
--launch`.

The digests stand in the settings file, where the gateway compares them before each start, and are
part of what an organization approves.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gateway.cli.mcp.programs import repin_program
from gateway.cli.shared.in_force import in_force
from gateway.cli.shared.target import GatewayError, end
from gateway.settings.edit import rewrite, with_key
from gateway.settings.file import Flags
from gateway.settings.load import config_path, load

if TYPE_CHECKING:
    from mcp_bridge.upstream.launch_spec import Digest


def launched(
    name: str, executable: str, arguments: Sequence[str], *, may_drift: bool
) -> dict[str, Any]:
    """Return the keys of a server's table.

    Raises: click.ClickException if the command is not there, or could be another one tomorrow
    without anybody's approval and `may_drift` does not allow it.
    """
    from mcp_bridge.upstream.stdio.package_refs import unpinned

    command = shutil.which(executable)
    if command is None:
        raise click.ClickException(f"{executable}: no file here that can be run")
    command = os.path.abspath(command)
    for how in unpinned(command, arguments):
        if not may_drift:
            raise click.ClickException(f"{how}; or add it as it is, with --unpinned")
        click.echo(f"Warning: {how}.", err=True)
    digests = now(name, command, arguments, ())
    return {"command": command, "args": list(arguments), "digests": digests}


def now(
    name: str, command: str, arguments: Sequence[str], kept: Sequence[Digest]
) -> list[dict[str, str]]:
    """Return what the command is now. Raises: click.ClickException."""
    from mcp_bridge.upstream.launch_errors import StdioError
    from mcp_bridge.upstream.stdio.launch_digests import digests_of

    try:
        found: list[dict[str, str]] = msgspec.to_builtins(
            list(digests_of(name, command, arguments, kept))
        )
    except StdioError as error:
        raise click.ClickException(str(error)) from None
    return found


def accept_launch(name: str, flags: dict[str, Flags]) -> None:
    """Pin what a server's command is now, and say what is another one than before: in the settings
    file, or where it was added. Of a URL there is nothing to pin. Raises: click.ClickException."""
    from gateway.settings.mcp_servers import to_launch

    settings = load(flags)
    in_file = [each.name for each in settings.mcp.servers]
    for server in in_force(settings).mcp.servers:
        if server.name == name and server.command is not None:
            spec = to_launch(server)
            found = now(name, spec.command, spec.args, spec.digests)
            if found == msgspec.to_builtins(list(spec.digests)):
                return
            if name in in_file:
                path = config_path(flags)
                rewrite(path, with_key(path.read_text(), name, "digests", found), flags)
                where = f"in {path}; a running gateway knows it once reloaded"
            else:
                try:
                    asyncio.run(repin_program(settings, name, found))
                except GatewayError as error:
                    end(error)
                where = "where it was added"
            before = {place(each): each.get("sha256") for each in server.digests}
            for each in found:
                if before.get(place(each), "") != each.get("sha256"):
                    known = before.get(place(each)) or "nothing"
                    click.echo(f"{place(each)}: {known} -> {each.get('sha256', 'by its digest')}")
            click.echo(f"{name} is pinned so {where}.")


def place(digest: dict[str, str]) -> str:
    return digest.get("path") or digest.get("reference", "")
