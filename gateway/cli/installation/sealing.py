"""`tollgate secret` and `tollgate vault`: replace the installation's secret, and seal anew what
stands in Postgres.

No gateway may seal by a key that another one does not know yet. So a new key goes behind those that
are there first; once every worker has read it, it goes before them, and new things are made with
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.exceptions import Exit

from gateway.cli.shared.command import connections, refuse, with_options, with_settings
from gateway.cli.shared.target import examples
from gateway.home import Home
from gateway.processes.control_socket import NoSupervisor, ReloadRequest, ask
from gateway.settings.load import Settings

if TYPE_CHECKING:
    from gateway.secret import Secret

EXIT_REFUSED = 1
STEPS = ("add", "use")


@click.group()
def secret() -> None:
    """Manage the secret that seals what Postgres stores."""


@secret.command(
    epilog=examples("tollgate secret rotate", "tollgate secret rotate --step add --config gw.toml")
)
@with_settings
@with_options(
    click.option(
        "--step",
        type=click.Choice(STEPS),
        help="Only change the file, for gateways that share it: `add` puts a new key behind the "
        "others; once all gateways have the file, `use` puts it first.",
    )
)
async def rotate(settings: Settings, step: str | None) -> None:
    """Replace the secret: make a new key, have all workers use it, and seal everything anew.

    The `tollgate up` of the home replaces its workers twice, one by one, so that none meets what it
    cannot open. Old keys stay in the file, for as long as tokens and backups of their time are to
    open. Where nothing runs here, take the steps: --step add, then --step use.
    """
    from gateway.secret import Secret

    path, home = settings.secret_key_file, Home(settings.home)
    if step is None and not await _has_taken_up(home, dry_run=True):
        refuse(
            "no `tollgate up` runs here: `--step add`, bring the file to all gateways and start "
            "them anew, `--step use`, the same again, `tollgate secret reseal` and `tollgate vault "
            "rewrap`",
            status=2,
        )
    if step != "use":
        Secret.load(path).with_new_key().write(path)
        click.echo(f"{path} has a new key, behind the others.")
    if step is None:
        await _has_taken_up(home)
    if step != "add":
        found = Secret.load(path)
        found.with_last_key_first().write(path)
        click.echo(f"New things are made with the key {found.keys[-1].id}.")
    if step is None:
        await _has_taken_up(home)
        await _seal_anew(settings)


async def _has_taken_up(home: Home, *, dry_run: bool = False) -> bool:
    """Have the workers of a home replaced, which read the secret; tell whether any run there. Exits
    where it refuses."""
    request = ReloadRequest(replaces_workers=True, is_dry_run=dry_run)
    try:
        answer = await ask(home, request, lambda _: None)
    except NoSupervisor:
        return False
    if answer.is_refused:
        refuse(answer.message, status=EXIT_REFUSED)
    if not dry_run:
        click.echo("All workers have read the secret.")
    return True


async def _seal_anew(settings: Settings) -> None:
    from gateway.secret import Secret

    found = Secret.load(settings.secret_key_file)
    is_whole = await _reseal_rows(settings, found)
    await _rewrap_credentials(settings, found)
    if not is_whole:
        raise Exit(1)


@secret.command()
@with_settings
async def reseal(settings: Settings) -> None:
    """Seal files, batches, responses, conversations and texts of requests under the current secret.

    `tollgate secret rotate` does it. Alone: once a new key stands first in the secret's file and
    all gateways have it; run `tollgate vault rewrap` next, for credentials. A day later the old key
    can leave the file. A repeat goes on where an earlier run was cut short. Says how many rows it
    skipped and why, names each that does not open, and then exits with 1.
    """
    from gateway.secret import Secret

    if not await _reseal_rows(settings, Secret.load(settings.secret_key_file)):
        raise Exit(1)


async def _reseal_rows(settings: Settings, secret: Secret) -> bool:
    """Tell whether no row was skipped."""
    from gateway.app.sealed_rows import reseal as reseal_rows

    async with connections(settings) as (db, _):
        done = await reseal_rows(db, secret)
    for row, reason in done.unreadable.items():
        click.echo(f"{row}: cannot be read: {reason}")
    click.echo(f"{done.num_sealed} rows were sealed.")
    if done.unreadable:
        click.echo(f"{len(done.unreadable)} rows were skipped: they cannot be read, see above.")
    for table, count in done.num_held.items():
        click.echo(
            f"{count} rows of {table} were skipped: others changed them meanwhile, or a gateway"
            " still seals under an older secret. Run it again before that secret leaves the file."
        )
    return done.is_whole


@click.group()
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

    await _rewrap_credentials(settings, Secret.load(settings.secret_key_file))


async def _rewrap_credentials(settings: Settings, secret: Secret) -> None:
    from gateway.vault.credentials import rewrap_credentials
    from gateway.vault.envelope import Vault

    vault = Vault(secret)
    count: int = 0
    after: str | None = ""
    async with connections(settings) as (db, _):
        while after is not None:
            async with db.begin() as conn:
                result = await rewrap_credentials(conn, vault, after=after)
            count, after = count + result.done, result.last
    click.echo(f"{count} wrapped anew.")
