"""`tollgate doctor`, `config` and `reload`: say what keeps an installation from running and what
its settings are, and put others in force."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import click
import msgspec
from click.exceptions import Exit

from gateway.cli.shared.command import STATE, refuse, run, with_options
from gateway.cli.shared.tables import STYLES, Column, Output, printable, show, with_output
from gateway.cli.shared.target import examples
from gateway.settings.file import Flags, SettingsError
from gateway.settings.load import load, load_report

EXIT_FAILS = 1
REFUSED = 1
NOBODY = 2
CHANGE_COLORS = {"+": "green", "-": "red", "~": "yellow"}
MARKS = {"ok": "ok", "warning": "look", "fails": "FAILS"}
SETTING_COLUMNS = (
    Column("KEY", "key"),
    Column("VALUE", "value", show=lambda row: value_of(row["value"])),
    Column("FROM", "source"),
)


@click.command(epilog=examples("tollgate doctor", "tollgate doctor --ask-upstreams --json"))
@with_options(*STATE)
@click.option(
    "--ask-upstreams", is_flag=True, help="Ask each upstream for its models, with its key."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def doctor(ask_upstreams: bool, as_json: bool, **flags: Flags) -> None:
    """Look for what keeps Tollgate from running here, and say what to do about it.

    Looks at the settings, home, disk, memory, port, GPU and driver, databases with their versions
    and clocks, models, the keys of upstreams, and the mail server. Starts and changes nothing, and
    may run beside `tollgate up`. Exit code: 0, or 1 if something fails.
    """
    from gateway.processes.checks.installation import diagnose

    states: list[str] = []

    async def look() -> None:
        async for found in diagnose(flags, ask_upstreams=ask_upstreams):
            states.append(found.state)
            if as_json:
                click.echo(msgspec.json.encode(found).decode())
                continue
            mark = click.style(f"{MARKS[found.state]:<6}", fg=STYLES[found.state])
            click.echo(f"{mark} {printable(found.check):<16} {printable(found.found)}")
            if found.advice is not None:
                click.echo(f"{'':<23} -> {printable(found.advice)}")

    run(look())
    if "fails" in states:
        sys.exit(EXIT_FAILS)


@click.group()
def config() -> None:
    """Check the settings, and show what they are and where each comes from."""


@config.command(epilog=examples("tollgate config check", "tollgate config check --config new.toml"))
@with_options(*STATE)
def check(**flags: Flags) -> None:
    """Check the settings as a start would, with the models and price books they name.

    Starts and fetches nothing. Exit code: 0, or 2 with the line that names the mistake.
    """
    from billing.errors import BillingError
    from gateway.processes.models.model_folders import check_models
    from gateway.settings.prices import load_prices

    report = load_report(flags)
    settings = report.settings
    check_models(settings, weights=True)
    try:
        load_prices(settings)
    except BillingError as error:
        raise SettingsError(f"price_books: {error}") from None
    where = "The defaults are" if report.path is None else f"{report.path} is"
    models, servers, plans = map(len, (settings.models, settings.mcp.servers, settings.plans))
    click.echo(
        f"{where} good. Models: {models}, MCP servers: {servers}, plans: {plans}. "
        f"Home: {settings.home}"
    )


@config.command(
    "show", epilog=examples("tollgate config show", "tollgate config show port mcp --given")
)
@with_options(*STATE)
@with_output
@click.option("--given", is_flag=True, help="Leave out defaults.")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
def show_settings(keys: tuple[str, ...], given: bool, output: Output, **flags: Flags) -> None:
    """Show each setting that is in force at a start, and where it comes from.

    A source is the line of the file, a variable, a flag or `default`. KEY shows a key and what is
    below it. Passwords, queries of URLs, and the environment and arguments of MCP servers are not
    shown.
    """
    from gateway.settings.origins import DEFAULT, origins_of

    found = [
        msgspec.structs.asdict(each)
        for each in origins_of(load_report(flags))
        if not (given and each.source == DEFAULT) and (not keys or any(map(each.is_below, keys)))
    ]
    show(found, SETTING_COLUMNS, output, empty="Nothing is set.")


@click.command(epilog=examples("tollgate reload --dry-run", "tollgate reload"))
@with_options(*STATE)
@click.option("--dry-run", is_flag=True, help="Say what would change, and change nothing.")
@click.option(
    "--workers",
    is_flag=True,
    help="Replace the workers one by one in any case: for another version, or a new secret.",
)
@click.option(
    "--stop-first",
    is_flag=True,
    help="Stop an engine before the one that replaces it starts, where memory has no room for both."
    " Nobody serves its model meanwhile.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def reload(dry_run: bool, workers: bool, stop_first: bool, as_json: bool, **flags: Flags) -> None:
    """Put the settings in force that the file now says, without a restart.

    The running `tollgate up` reads the file and the variables that it was started with. All of it
    is checked first, and a refusal leaves everything as it was. Models, upstreams, prices, plans,
    MCP servers and deadlines are in force in every worker at once; for the rest the workers are
    replaced one by one, and streams have `drain_timeout_s` to end in the old ones. Prints what
    changes, a line each. Exits with 1 if the settings are refused, and with 2 if nothing runs.
    """
    from gateway.home import Home
    from gateway.processes.control_socket import NoSupervisor, ReloadRequest, ask

    try:
        home = Home(load(flags).home)
    except SettingsError as error:
        refuse(f"Refused, the old settings stay in force: {error}", status=REFUSED)
    request = ReloadRequest(is_dry_run=dry_run, replaces_workers=workers, stops_first=stop_first)
    try:
        answer = asyncio.run(ask(home, request, lambda line: click.echo(line, err=True)))
    except NoSupervisor as error:
        refuse(error, status=NOBODY)
    if as_json:
        click.echo(msgspec.json.encode(answer).decode())
    else:
        for line in answer.changes:
            click.secho(printable(line), fg=CHANGE_COLORS.get(line[:1]))
        message = printable(answer.message)
        click.secho(message, err=answer.is_refused, fg="red" if answer.is_refused else None)
    if answer.is_refused:
        raise Exit(REFUSED)


def value_of(value: Any) -> str:
    return "-" if value is None else msgspec.json.encode(value).decode()
