"""`tollgate vault rewrap`: wraps credentials under the current secret, so that an older one can
leave its file."""

from __future__ import annotations

import click

from gateway.cli.command import STATE, run, with_options
from gateway.settings.file import Flags
from gateway.settings.load import load


@click.group()
def vault() -> None:
    """Credentials of upstreams."""


@vault.command()
@with_options(*STATE)
def rewrap(**flags: Flags) -> None:
    """Wrap the keys of all upstream credentials under the current secret.

    After a new key stands first in the secret's file and all gateways have it. Says how many were
    wrapped anew, and names in the log what cannot be read. No credential itself is touched.
    """
    from gateway.cli import administration
    from gateway.secret import Secret
    from gateway.vault.credentials import rewrap_credentials
    from gateway.vault.envelope import Vault

    settings = load(flags)

    async def work() -> None:
        known = Vault(Secret.load(settings.secret_key_file))
        done, after = 0, ""
        async with administration.connections(settings) as (db, _):
            while True:
                async with db.begin() as conn:
                    found = await rewrap_credentials(conn, known, after=after)
                done += found.done
                if found.last is None:
                    break
                after = found.last
        click.echo(f"{done} wrapped anew.")

    run(work())
