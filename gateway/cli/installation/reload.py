"""`tollgate reload`: has the running `tollgate up` of a home read its settings again."""

from __future__ import annotations

import asyncio

import click
import msgspec
from click.exceptions import Exit

from gateway.cli.shared.command import STATE, refuse, with_options
from gateway.settings.file import Flags, SettingsError
from gateway.settings.load import load

REFUSED = 1
NOBODY = 2


@click.command()
@with_options(*STATE)
@click.option("--dry-run", is_flag=True, help="Say what would change, and change nothing.")
@click.option(
    "--workers",
    is_flag=True,
    help="Replace the workers one by one in any case: for another version, or a new secret.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def reload(dry_run: bool, workers: bool, as_json: bool, **flags: Flags) -> None:
    """Put the settings in force that the file now says, without a restart.

    The running `tollgate up` reads the file and the variables that it was started with. All of it
    is checked first, and a refusal leaves everything as it was. Models, upstreams, prices, plans,
    MCP servers and deadlines are in force in every worker at once; for the rest the workers are
    replaced one by one, and streams have `drain_timeout_s` to end in the old ones. Prints what
    changes, a line each. Exits with 1 if the settings are refused, and with 2 if nothing runs.

    \b
    Examples:
      tollgate reload --dry-run     # after an edit of tollgate.toml
      tollgate reload
    """
    from gateway.home import Home
    from gateway.processes.control_socket import NoSupervisor, ReloadRequest, ask

    try:
        home = Home(load(flags).home)
    except SettingsError as error:
        refuse(f"Refused, the old settings stay in force: {error}", status=REFUSED)
    request = ReloadRequest(is_dry_run=dry_run, replaces_workers=workers)
    try:
        answer = asyncio.run(ask(home, request))
    except NoSupervisor as error:
        refuse(error, status=NOBODY)
    if as_json:
        click.echo(msgspec.json.encode(answer).decode())
    else:
        for line in answer.changes:
            click.echo(line)
        click.echo(answer.message, err=answer.is_refused)
    if answer.is_refused:
        raise Exit(REFUSED)
