"""The command `tollgate`: reads arguments, ends with one clear line and an exit code."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.exceptions import Exit
from click.shell_completion import ShellComplete, get_completion_class

from foundation.imports import importing
from gateway.cli.examples import add_examples
from gateway.cli.identity.tenancy import all_orgs, orgs, projects
from gateway.cli.identity.users import users
from gateway.cli.installation.backup import backup
from gateway.cli.installation.settings import config, doctor, reload
from gateway.cli.mcp.servers import mcp
from gateway.cli.money.billing import billing, reconcile
from gateway.cli.money.budgets import alerts, budgets
from gateway.cli.money.credits import credits
from gateway.cli.money.invoices import invoices
from gateway.cli.money.prices import prices
from gateway.cli.money.spool import spool
from gateway.cli.observe.audit import audit
from gateway.cli.observe.logs import logs
from gateway.cli.observe.status import models, status
from gateway.cli.observe.top import top
from gateway.cli.observe.usage import costs, usage
from gateway.cli.shared.command import (
    FOLDER,
    JSON,
    STATE,
    connections,
    refuse,
    run,
    with_options,
    with_settings,
)
from gateway.cli.shared.tables import Column, Output, show, with_output
from gateway.cli.shared.target import examples
from gateway.cli.shared.times import to_day
from gateway.principal import KEY_LANES, KEY_LIMIT_NAMES
from gateway.settings.file import Flags, SettingsError
from gateway.settings.load import SavedSettings, Settings, is_text, load, restore

if TYPE_CHECKING:
    from gateway.tenancy.keys.keys import CreatedKey, KeyRow

MAX_LIFETIME_DAYS = 36_500
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


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tollgate", message="%(prog)s %(version)s")
def tollgate() -> None:
    """A multi-tenant LLM gateway with its own inference engine.

    `tollgate up` is all that a first start needs; it prints an example to call.

    Settings come from tollgate.toml, then from the environment (TOLLGATE_HOME, TOLLGATE_HOST,
    TOLLGATE_PORT, TOLLGATE_MODEL, TOLLGATE_WORKERS, TOLLGATE_CONFIG, TOLLGATE_DATABASE_URL,
    TOLLGATE_REDIS_URL, TOLLGATE_SECRET_KEY_FILE, TOLLGATE_PUBLIC_URL), then from flags; the last
    one wins.
    """


@tollgate.command()
@with_options(*STATE, *ADDRESS, *MODEL)
@click.option("--workers", type=int, help="Gateway processes that share the port. Default: 1")
def up(**flags: Flags) -> None:
    """Start everything: databases, engines, gateway workers.

    Postgres and Redis are embedded unless TOLLGATE_DATABASE_URL and TOLLGATE_REDIS_URL are set.
    The first start makes an API key and an admin key and writes them to credentials.json in the
    home. Ctrl-C stops all of it, a second Ctrl-C at once. SIGHUP reloads the settings, as `tollgate
    reload --workers` does.
    """
    from gateway import logs

    with importing():
        from gateway.processes.model_folders import check_models
        from gateway.processes.reachability import check_databases
        from gateway.processes.start_view import StartView
        from gateway.processes.supervisor import Supervisor

    def read() -> Settings:
        found = fetch_models(load(flags), weights=True)
        check_models(found, weights=True)
        return found

    logs.configure(load(flags).log_level, json_lines=False, process=logs.SUPERVISOR)
    settings = read()

    async def supervise() -> None:
        await check_databases(settings)
        view = StartView(click.echo, on_terminal=sys.stdout.isatty())
        await Supervisor(settings, read, view).run()

    run(supervise())


@tollgate.command()
@with_options(*STATE, *ADDRESS, *MODEL)
def gateway(**flags: Flags) -> None:
    """Run one gateway worker alone, in the foreground.

    For a container or a systemd unit: Postgres and Redis must be configured, `tollgate migrate`
    must have run, and the engines of models with a path must run elsewhere (`engine = "tcp:..."`).
    SIGTERM drains. SIGHUP reads the settings again and takes up what is live of them; what is
    fixed with a process is refused.
    """
    settings = load(flags)
    for key in ("database_url", "redis_url"):
        if getattr(settings, key) is None:
            raise SettingsError(f"{key}: set TOLLGATE_{key.upper()}; only `tollgate up` embeds one")
    settings = fetch_models(settings, weights=False)
    from gateway.app import worker
    from gateway.home import Home, RestoreUnfinished
    from gateway.net import listener
    from gateway.processes.model_folders import check_models
    from gateway.settings.changes import refuse_what_is_fixed

    check_models(settings, weights=False)
    try:
        Home(settings.home).create()
        bound = listener.bind(settings.host, settings.port)
    except (RestoreUnfinished, listener.AddressError) as error:
        refuse(error, status=2)
    numbers = count(1)

    def read_again() -> SavedSettings:
        fresh = fetch_models(load(flags), weights=False)
        check_models(fresh, weights=False)
        refuse_what_is_fixed(settings, fresh)
        return SavedSettings(number=next(numbers), settings=fresh)

    worker_id = f"gateway-{secrets.token_hex(4)}"
    worker.run(settings, bound, worker_id=worker_id, read_again=read_again)


@tollgate.command("worker", hidden=True)
@click.option("--id", "worker_id", required=True, help="The name of its spool folder.")
@click.option(
    *("--settings", "settings_file"), type=FOLDER, required=True, help="The settings, resolved."
)
@click.option("--listen-fd", type=int, required=True, help="The descriptor of a bound socket.")
@click.option(
    "--report-fd", type=int, required=True, help="The descriptor that gets what it reports."
)
def worker_process(worker_id: str, settings_file: Path, listen_fd: int, report_fd: int) -> None:
    """Run a worker of `tollgate up`, which alone calls this."""
    with importing():
        from gateway.app import worker
        from gateway.home import Home

    try:
        saved = restore(settings_file)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        refuse(f"--settings: {type(error).__name__}: {error}", status=2)
    worker.run(
        saved.settings,
        socket.socket(fileno=listen_fd),
        worker_id=worker_id,
        metrics=Home(saved.settings.home).metrics,
        number=saved.number,
        read_again=partial(restore, settings_file),
        report_fd=report_fd,
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
    *(doctor, config, reload, backup, logs, top, status, models),
    *(usage, costs, alerts, budgets, credits, invoices, audit, reconcile, spool, prices, billing),
    *(orgs, projects, users, mcp),
):
    tollgate.add_command(group)


@tollgate.group()
def vault() -> None:
    """Manage the credentials of upstreams."""


@vault.command()
@with_settings
async def rewrap(settings: Settings) -> None:
    """Wrap the keys of all upstream credentials under the current secret.

    Run it once a new key stands first in the secret's file and all gateways have it. Says how many
    were wrapped anew, and names in the log what cannot be read. No credential itself is touched.
    """
    from gateway.secret import Secret
    from gateway.vault.credentials import rewrap_credentials
    from gateway.vault.envelope import Vault

    vault = Vault(Secret.load(settings.secret_key_file))
    count: int = 0
    after: str | None = ""
    async with connections(settings) as (db, _):
        while after is not None:
            async with db.begin() as conn:
                result = await rewrap_credentials(conn, vault, after=after)
            count, after = count + result.done, result.last
    click.echo(f"{count} wrapped anew.")


@tollgate.group()
def secret() -> None:
    """Manage the secret that seals the requests and answers that Postgres stores."""


@secret.command()
@with_settings
async def reseal(settings: Settings) -> None:
    """Seal files, batches, responses and conversations under the current secret.

    Run it once a new key stands first in the secret's file and all gateways have it; run `tollgate
    vault rewrap` next, for credentials. A day later the old key can leave the file. A repeat goes
    on where an earlier run was cut short. Names each row that does not open, and then exits with 1.
    """
    from gateway.app.sealed_rows import reseal as reseal_rows
    from gateway.secret import Secret

    async with connections(settings) as (db, _):
        done = await reseal_rows(db, Secret.load(settings.secret_key_file))
    for row in done.unreadable:
        click.echo(f"{row}: cannot be read")
    click.echo(f"{done.num_sealed} rows were sealed.")
    if done.unreadable:
        raise Exit(1)


@tollgate.group()
def keys() -> None:
    """Create, list and revoke API keys, while `tollgate up` runs or not."""


OWN = "A limit of the key's own, beside that of its plan."


@keys.command("create")
@with_settings
@JSON
@click.option("--name", required=True, help="A label for people: whose key it is, or what for.")
@click.option("--org", default="default", show_default=True, help="Name of the organization.")
@click.option("--project", default="default", show_default=True, help="Name of the project.")
@click.option(
    *("--scope", "scopes"),
    multiple=True,
    default=("inference",),
    show_default=True,
    help="inference, mcp:call, usage:read or admin:*; may be given several times.",
)
@click.option(
    "--plan",
    help="A [plan.NAME] of the settings. Default: no plan of its own. The plans of its project and "
    "organization bind it in any case.",
)
@click.option(
    "--expires-in-days",
    type=click.IntRange(1, MAX_LIFETIME_DAYS),
    help="Let the key expire after this many days. Default: never.",
)
@click.option(
    *("--model", "models"),
    multiple=True,
    help="A model that the key may use; may be given several times. Default: all.",
)
@click.option(
    *("--ip-range", "ip_ranges"),
    multiple=True,
    help="A network (CIDR) or address that may use the key. Default: anywhere.",
)
@with_options(
    *(click.option(f"--{name.replace('_', '-')}", type=int, help=OWN) for name in KEY_LIMIT_NAMES)
)
@click.option(
    "--lane", type=click.Choice(KEY_LANES), help="The highest lane that its requests may use."
)
async def create(
    settings: Settings,
    name: str,
    org: str,
    project: str,
    scopes: tuple[str, ...],
    plan: str | None,
    expires_in_days: int | None,
    models: tuple[str, ...],
    ip_ranges: tuple[str, ...],
    lane: str | None,
    as_json: bool,
    **limits: Any,
) -> None:
    """Create a key and print it. It is shown only this once and stored nowhere."""
    from gateway.audit.log import COMMAND_LINE
    from gateway.secret import Secret
    from gateway.tenancy.keys.keys import PEPPER_PURPOSE, create_key
    from gateway.tenancy.keys.restrictions import Restrictions
    from gateway.tenancy.orgs import find_org
    from gateway.tenancy.projects import find_project

    lifetime = None if expires_in_days is None else timedelta(days=expires_in_days)
    async with connections(settings) as (db, _), db.begin() as conn:
        pepper = Secret.load(settings.secret_key_file).current
        org_id = (await find_org(conn, name=org)).id
        owner = await find_project(conn, org_id=org_id, name=project)
        made = await create_key(
            conn,
            org_id=org_id,
            project_id=owner.id,
            name=name,
            scopes=scopes,
            pepper=pepper.derive(PEPPER_PURPOSE),
            pepper_id=pepper.id,
            plan=plan,
            expires_at=None if lifetime is None else datetime.now(tz=UTC) + lifetime,
            restrictions=Restrictions(
                models=list(models) or None,
                ip_ranges=list(ip_ranges) or None,
                lane=lane,
                **limits,
            ),
            actor=COMMAND_LINE,
        )
    show_once(made, as_json)


KEY_COLUMNS = (
    Column("ID", "id", "id"),
    Column("KEY", "hint", show=lambda row: f"{row['prefix']}...{row['last_four']}"),
    Column("STATE", "state"),
    Column("CREATED", "created_at", gives_way=True, show=lambda row: to_day(row["created_at"])),
    Column("PROJECT", "project_id", "id", gives_way=True),
    Column("PLAN", "plan", gives_way=True),
    Column("SCOPES", "scopes", gives_way=True, show=lambda row: ",".join(row["scopes"])),
    Column("NAME", "name"),
)


@keys.command("list")
@with_settings
@with_output
async def list_(settings: Settings, output: Output) -> None:
    """List all keys, by organization, oldest first: revoked and expired ones too, never the keys
    themselves."""
    from gateway.tenancy.keys.keys import KeyRow, select_keys
    from gateway.tenancy.pages import read_all
    from gateway.tenancy.tables import api_keys

    rows: list[dict[str, Any]] = []
    async with connections(settings) as (db, _), db.connect() as conn:
        async for owner in all_orgs(conn, archived=True):
            rows += [
                msgspec.structs.asdict(key) | {"state": state_of(key)}
                async for key in read_all(conn, select_keys(owner.id), api_keys.c.id, KeyRow)
            ]
    show(rows, KEY_COLUMNS, output)


def show_once(made: CreatedKey, as_json: bool) -> None:
    if as_json:
        fields = msgspec.structs.asdict(made.row) | {"key": made.secret}
        click.echo(msgspec.json.encode(fields).decode())
    else:
        click.echo(to_record(made.row, made.secret))


def to_record(key: KeyRow, secret: str) -> str:
    """Show a new key as a person reads it."""
    fields = {
        "id": key.id,
        "name": key.name,
        "project": key.project_id or "-",
        "plan": key.plan or "-",
        "scopes": ", ".join(key.scopes),
        "expires": "never" if key.expires_at is None else key.expires_at.isoformat(" ", "minutes"),
        "key": secret,
    }
    lines = [f"{name:<9}{value}" for name, value in fields.items()]
    return "\n".join((*lines, "", "Keep the key: it is stored nowhere and not shown again."))


def state_of(key: KeyRow) -> str:
    expired = key.expires_at is not None and key.expires_at <= datetime.now(tz=UTC)
    return "revoked" if key.revoked_at is not None else "expired" if expired else "active"


@keys.command("rotate")
@with_settings
@JSON
@click.option(
    "--grace-s",
    type=int,
    help="How many seconds the old key stays valid. Default: one day. 0: it ends at once.",
)
@click.argument("key_id")
async def rotate(settings: Settings, key_id: str, grace_s: int | None, as_json: bool) -> None:
    """Rotate the secret of a key and print it, only this once; the old one stays valid for a
    while."""
    from gateway.audit.log import COMMAND_LINE
    from gateway.secret import Secret
    from gateway.tenancy.keys.changes import DEFAULT_GRACE_S, rotate_key
    from gateway.tenancy.keys.keys import PEPPER_PURPOSE, owner_of_key

    async with connections(settings) as (db, redis):
        pepper = Secret.load(settings.secret_key_file).current
        async with db.connect() as conn:
            org_id = await owner_of_key(conn, key_id)
        made = await rotate_key(
            db,
            redis,
            key_id,
            org_id=org_id,
            grace_s=DEFAULT_GRACE_S if grace_s is None else grace_s,
            pepper=pepper.derive(PEPPER_PURPOSE),
            pepper_id=pepper.id,
            actor=COMMAND_LINE,
        )
    show_once(made, as_json)


@keys.command("revoke")
@with_settings
@click.argument("key_id")
async def revoke(settings: Settings, key_id: str) -> None:
    """Revoke a key by its id (`key_...`); every worker refuses it within a second."""
    from gateway.audit.log import COMMAND_LINE
    from gateway.tenancy.keys.keys import owner_of_key, revoke_key

    async with connections(settings) as (db, redis):
        async with db.connect() as conn:
            org_id = await owner_of_key(conn, key_id)
        await revoke_key(db, redis, key_id, org_id=org_id, actor=COMMAND_LINE)
    click.echo(f"{key_id} is revoked.")


def fetch_models(settings: Settings, *, weights: bool) -> Settings:
    """Return the settings with a folder for every model that is named like one on a hub."""
    from gateway.processes.model_downloads import with_folders

    return with_folders(settings, weights=weights, say=click.echo)


@tollgate.command(
    epilog=examples(
        'eval "$(tollgate completion bash)"',
        "tollgate completion fish > ~/.config/fish/completions/tollgate.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script for SHELL that completes commands and options.

    Let the shell run it (`eval`), or keep it where the shell looks for completions: bash in
    ~/.local/share/bash-completion/completions/tollgate, zsh as _tollgate in a folder of $fpath,
    fish in ~/.config/fish/completions/tollgate.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells of the choice"
    made = kind(context.find_root().command, {}, "tollgate", "_TOLLGATE_COMPLETE")
    click.echo(ShellComplete.source(made))  # bash's own would start a bash, to ask its version


add_examples(tollgate, "tollgate")
