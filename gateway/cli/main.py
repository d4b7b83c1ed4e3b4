"""The command `tollgate`: reads arguments, ends with one clear line and an exit code."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import threading
from itertools import count
from typing import TYPE_CHECKING

import click

from foundation.imports import importing
from gateway.cli.completion import complete_names, completion
from gateway.cli.examples import add_examples
from gateway.cli.identity.keys import keys
from gateway.cli.identity.tenancy import orgs, projects
from gateway.cli.identity.users import users
from gateway.cli.installation.backup import backup
from gateway.cli.installation.deadlines import deadlines
from gateway.cli.installation.model_cache import models
from gateway.cli.installation.plans import plans, webhooks
from gateway.cli.installation.sealing import secret, vault
from gateway.cli.installation.settings import config, doctor, reload
from gateway.cli.mcp.servers import mcp
from gateway.cli.money.billing import billing, reconcile
from gateway.cli.money.budgets import alerts, budgets, mails
from gateway.cli.money.credits import credits
from gateway.cli.money.invoices import invoices
from gateway.cli.money.prices import prices
from gateway.cli.money.spool import spool
from gateway.cli.observe.audit import audit
from gateway.cli.observe.fleet import fleet
from gateway.cli.observe.logs import logs
from gateway.cli.observe.requests import requests
from gateway.cli.observe.status import status
from gateway.cli.observe.top import top
from gateway.cli.observe.usage import costs, usage
from gateway.cli.shared.command import (
    STATE,
    refuse,
    run,
    with_options,
    with_settings,
)
from gateway.settings.child_environment import engine_environment
from gateway.settings.file import Flags, SettingsError
from gateway.settings.load import SavedSettings, Settings, is_text, load, own_environment

if TYPE_CHECKING:
    from gateway.processes.models.model_cache import ModelHolds
    from gateway.processes.start_view import StartView

KERNEL_COMPILER = "engine.kernels.cpu.compiling"
"""The module that compiles what an engine on a processor asks for and is not there yet."""
ADDRESS = (
    click.option("--host", help="Address to listen on. Default: 127.0.0.1"),
    click.option("--port", type=int, help="Port to listen on; 0: any free one. Default: 8000"),
)
MODEL = (
    click.option(
        "--model",
        help="Serve this Hugging Face folder, or org/name from a hub (HF_ENDPOINT), and no model "
        "of the settings. Default, where they name none: models/penny",
    ),
    click.option("--revision", help="The branch, tag or commit of a --model from a hub."),
)


def main() -> None:
    """Run the console script."""
    for argument in sys.argv[1:]:
        if not is_text(argument):
            refuse(f"{argument[:200]!r}: not UTF-8", status=2)
    try:
        tollgate(prog_name="tollgate")
    except SettingsError as error:
        refuse(error, status=2)


SECTIONS = {
    "Start": ("up", "reload", "gateway", "engine", "migrate"),
    "Look": ("status", "top", "fleet", "logs", "requests", "usage", "costs", "alerts", "mails"),
    "Installation": ("doctor", "config", "models", "deadlines", "prices", "backup", "completion"),
    "Customers and keys": ("keys", "orgs", "projects", "users", "plans"),
    "Money": ("budgets", "credits", "invoices", "billing", "reconcile", "spool"),
    "Tools": ("mcp", "webhooks"),
    "Security": ("audit", "secret", "vault"),
}


class SectionedGroup(click.Group):
    """Lists its commands by what they are for; one of no section comes under `Other`."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(map(len, self.commands))
        rows = {
            name: command.get_short_help_str(formatter.width - 6 - longest)
            for name, command in self.commands.items()
            if not command.hidden
        }
        in_sections = {name for names in SECTIONS.values() for name in names}
        others = tuple(name for name in rows if name not in in_sections)
        for title, names in {**SECTIONS, "Other": others}.items():
            if found := [(name.ljust(longest), rows[name]) for name in names if name in rows]:
                with formatter.section(title):
                    formatter.write_dl(found)


def forbid_colors(context: click.Context, _: click.Parameter, value: str) -> None:
    """Print no colours where NO_COLOR is not empty (no-color.org)."""
    if value:
        context.color = False


@click.group(
    cls=SectionedGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="tollgate", message="%(prog)s %(version)s")
@click.option(
    "--no-color",
    envvar="NO_COLOR",
    default="",
    hidden=True,
    expose_value=False,
    callback=forbid_colors,
    help="Print no colours; meant to be set by the variable.",
)
def tollgate() -> None:
    """A multi-tenant LLM gateway with its own inference engine.

    `tollgate up` is all that a first start needs; it prints an example to call.

    Settings come from tollgate.toml, then from the environment (TOLLGATE_HOME, TOLLGATE_HOST,
    TOLLGATE_PORT, TOLLGATE_MODEL, TOLLGATE_WORKERS, TOLLGATE_CONFIG, TOLLGATE_DATABASE_URL,
    TOLLGATE_REDIS_URL, TOLLGATE_SECRET_KEY_FILE, TOLLGATE_PUBLIC_URL, TOLLGATE_RAY), then from
    flags; the last one wins.
    """


@tollgate.command()
@with_options(*STATE, *ADDRESS, *MODEL)
@click.option("--workers", type=int, help="Gateway processes that share the port. Default: 1")
@click.option(
    "--ray",
    metavar="ADDRESS",
    help="Have the engines that join run on a Ray cluster: auto, or HOST:PORT of its head.",
)
def up(**flags: Flags) -> None:
    """Start everything: databases, engines, gateway workers.

    Postgres and Redis are embedded unless TOLLGATE_DATABASE_URL and TOLLGATE_REDIS_URL are set.
    The first start makes an API key and an admin key and writes them to credentials.json in the
    home. Ctrl-C stops all of it, a second Ctrl-C at once. SIGHUP reloads the settings, as `tollgate
    reload --workers` does.
    """
    from gateway import logs

    found = load(flags)
    _compile_kernels(found)
    with importing():
        from gateway.fleet.joining.launch_plan import check_ray
        from gateway.processes.models.model_cache import ModelHolds
        from gateway.processes.models.model_folders import check_models
        from gateway.processes.reachability import check_databases
        from gateway.processes.start_view import StartView
        from gateway.processes.supervisor import Supervisor

    holds = ModelHolds()

    def read(view: StartView | None = None) -> Settings:
        found = load(flags)
        check_ray(found)
        found = fetch_models(found, weights=True, view=view, holds=holds)
        check_models(found, weights=True)
        return found

    in_json = found.logs.stdout and found.logs.format == "json"
    logs.configure(
        found.log_level,
        json_lines=in_json,
        process=logs.SUPERVISOR,
        to=sys.stdout if found.logs.stdout else sys.stderr,
    )
    if in_json:  # each line is one for whoever reads them
        view = StartView(logging.getLogger("gateway").info)
    else:
        view = StartView(click.echo, on_terminal=sys.stdout.isatty())

    async def supervise(settings: Settings) -> None:
        await check_databases(settings)
        await Supervisor(settings, read, view, in_force=holds.keep).run()

    try:
        run(supervise(read(view)))
    finally:
        view.close()


def _compile_kernels(settings: Settings) -> None:
    """Begin what engines wait for at a first start, while this process is still importing."""
    if any(model.started for model in settings.models):
        compiler = subprocess.Popen(
            [sys.executable, "-m", KERNEL_COMPILER],
            env=engine_environment(own_environment(), settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        threading.Thread(target=compiler.wait, name="kernel compiler", daemon=True).start()


@tollgate.command()
@with_options(*STATE, *ADDRESS, *MODEL)
def gateway(**flags: Flags) -> None:
    """Run one gateway worker alone, in the foreground.

    For a container or a systemd unit: Postgres and Redis must be configured, `tollgate migrate`
    must have run, and the engines of models with a path must run elsewhere (`engine = "tcp:..."`).
    SIGTERM drains. SIGHUP reads the settings again and takes up what is live of them; what is
    fixed with a process is refused. What operators store beside the file is taken up by itself.
    """
    settings = load(flags)
    for key in ("database_url", "redis_url"):
        if getattr(settings, key) is None:
            raise SettingsError(f"{key}: set TOLLGATE_{key.upper()}; only `tollgate up` embeds one")
    for model in settings.models:
        if model.joined:
            raise SettingsError(f"model {model.name}: joined: only `tollgate up` lets engines join")
    from gateway.app import worker
    from gateway.home import Home, RestoreUnfinished
    from gateway.installation.follower import with_stored
    from gateway.net import listener
    from gateway.processes.models.model_cache import ModelHolds
    from gateway.processes.models.model_folders import check_models
    from gateway.settings.changes import refuse_what_is_fixed

    holds = ModelHolds()
    settings = fetch_models(settings, weights=False, holds=holds)
    check_models(settings, weights=False)
    try:
        Home(settings.home).create()
        bound = listener.bind(settings.host, settings.port)
        metrics = listener.bind_metrics(settings.metrics.host, settings.metrics.port, bound)
    except (RestoreUnfinished, listener.AddressError) as error:
        refuse(error, status=2)
    numbers = count(1)

    def read_again() -> SavedSettings:
        fresh = fetch_models(load(flags), weights=False, holds=holds)
        check_models(fresh, weights=False)
        refuse_what_is_fixed(settings, fresh)
        return SavedSettings(number=next(numbers), settings=fresh)

    worker.run(
        with_stored(settings),
        bound,
        worker_id=f"gateway-{secrets.token_hex(4)}",
        read_again=read_again,
        metrics_listener=metrics,
        follows_stored=True,
    )


@tollgate.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Run one inference engine alone (`tollgate engine --help`).",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def engine(arguments: tuple[str, ...]) -> None:
    """Run one inference engine: a process of its own, which needs nothing of the gateway."""
    os.execv(sys.executable, [sys.executable, "-m", "engine", *arguments])


@tollgate.command()
@with_settings
async def migrate(settings: Settings) -> None:
    """Bring Postgres to the newest schema, and create the first keys.

    Idempotent, and safe while gateways run. `tollgate up` does it by itself.
    """
    from gateway.cli.shared import administration
    from gateway.processes import database

    async with administration.database_urls(settings) as (database_url, redis_url):
        known = await database.prepare(
            settings, database_url, redis_url, f"http://{settings.host}:{settings.port}/v1"
        )
    click.echo("The database has the newest schema.")
    if known is not None:
        click.echo(f"Its first keys stand in {settings.home / 'credentials.json'}")


for group in (
    *(doctor, config, completion, reload, backup, logs, top, status, models, plans, webhooks, keys),
    *(requests, usage, costs, alerts, mails, budgets, credits, invoices, audit, reconcile),
    *(spool, prices, fleet),
    *(billing, orgs, projects, users, mcp, secret, vault, deadlines),
):
    tollgate.add_command(group)


def fetch_models(
    settings: Settings,
    *,
    weights: bool,
    view: StartView | None = None,
    holds: ModelHolds,
) -> Settings:
    """Return the settings with a folder for every model that is on a hub or in a store. `view`:
    what is downloaded is shown there; None: as lines. `holds`: keeps the models of the cache."""
    from gateway.processes.models.model_cache import with_cached_models
    from gateway.processes.models.model_downloads import with_folders
    from gateway.processes.start_view import StartView

    view = view or StartView(click.echo)
    found = with_folders(settings, weights=weights, view=view)
    return with_cached_models(found, weights=weights, view=view, holds=holds)


add_examples(tollgate, "tollgate")
complete_names(tollgate, "tollgate")
