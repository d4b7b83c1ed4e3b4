"""`tollgate backup`: backs an installation up, checks a backup, restores one, removes old ones."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.exceptions import Exit

from gateway.cli.shared.command import FOLDER, JSON, STATE, refuse, run, with_options
from gateway.home import Home, HomeLock
from gateway.settings.load import Settings, config_path, load

if TYPE_CHECKING:
    from gateway.backup.creation import Source

ARCHIVE = click.argument("archive", type=FOLDER)
NAME = click.option("--backup", "name", help="The backup's name. Default: the newest.")
IDENTITY = click.option(
    "--identity",
    "identity_file",
    type=FOLDER,
    help="The file with the secret key, as `tollgate backup key` or age-keygen writes it.",
)


@click.group()
def backup() -> None:
    """Back an installation up, check a backup, restore one, remove old ones.

    ARCHIVE is a folder of backups. Copy it elsewhere: `tollgate backup` alone never does.
    """


@backup.command()
@click.argument("file", type=FOLDER)
def key(file: Path) -> None:
    """Make a key pair: the secret half in FILE, the recipient on standard output.

    Keep FILE away from this machine: whoever has it can read every backup, and without it nobody
    can.
    """
    from gateway.backup.archive import make_identity

    try:
        click.echo(make_identity(file))
    except OSError as error:
        refuse(error, status=2)


@backup.command()
@with_options(*STATE)
@click.option(
    *("--to", "recipients"),
    multiple=True,
    help="A recipient (`age1...`, or an `ssh-ed25519 ...` or `ssh-rsa ...` key), who can read the "
    "backup; may be given several times. Default: recipients under [backup] in the settings.",
)
@click.option(
    "--pg-dump",
    type=FOLDER,
    help="Use this pg_dump, of the server's release or a newer one. Default: the one of the "
    "embedded Postgres.",
)
@JSON
@ARCHIVE
def create(
    archive: Path,
    home: Path | None,
    config: Path | None,
    recipients: tuple[str, ...],
    pg_dump: Path | None,
    as_json: bool,
) -> None:
    """Add a backup to ARCHIVE, while `tollgate up` runs or not.

    It holds Postgres, the spools, the secret, the first keys, price books and the settings' file,
    as they were at one moment, sealed to the recipients. It lacks what stands in the environment,
    and files of tenants that are in an S3 store. A backup that was cut short is begun again and
    writes only what the archive does not have; so does the next one.
    """
    from gateway.backup.archive import Archive, NewBackup
    from gateway.backup.creation import create as create_backup

    settings = load({"home": home, "config": config})
    found_config = config_path({"config": config})
    to = recipients or tuple(settings.backup.recipients)

    def say(line: str) -> None:
        if not as_json:
            click.echo(line)

    async def work() -> NewBackup:
        async with source_of(settings, found_config, pg_dump) as source:
            return await create_backup(source, Archive(archive), to, say)

    async def show() -> None:
        made = await work()
        if as_json:
            click.echo(msgspec.json.encode(made._asdict()).decode())
        else:
            click.echo(
                f"{made.name}: {made.num_chunks} chunks, of which {made.num_written} are new"
            )

    run_backup(show())


@backup.command()
@IDENTITY
@NAME
@JSON
@ARCHIVE
def verify(archive: Path, identity_file: Path | None, name: str | None, as_json: bool) -> None:
    """Check that a backup in ARCHIVE is whole; exits with 1 if it is not.

    Without --identity: all its files are there and are what was written. With it, all of it is
    decrypted, compared with what was backed up, and its rows are counted.
    """
    from gateway.backup import verification
    from gateway.backup.archive import Archive, read_identities

    async def work() -> None:
        identities = [] if identity_file is None else read_identities(identity_file)
        found = Archive(archive)
        verdict = verification.verify(found, found.find(name), identities)
        if as_json:
            click.echo(msgspec.json.encode(verdict).decode())
        else:
            for problem in verdict.problems:
                click.echo(problem)
            rows = "" if verdict.rows is None else f", {sum(verdict.rows.values())} rows"
            state = "NOT WHOLE" if verdict.problems else "whole"
            click.echo(
                f"{verdict.backup}: {state}, {verdict.files} files, {verdict.bytes} bytes{rows}"
            )
        if verdict.problems:
            raise Exit(1)

    run_backup(work())


@backup.command()
@with_options(*STATE)
@IDENTITY
@NAME
@ARCHIVE
def restore(
    archive: Path,
    home: Path | None,
    config: Path | None,
    identity_file: Path | None,
    name: str | None,
) -> None:
    """Restore a backup of ARCHIVE into a home that is empty or does not exist.

    Where the settings name a Postgres, its database has to be empty, too. After a kill run it
    again: it goes on. What lay outside of the home comes to HOME/restored. Then `tollgate up`
    starts the installation as it was; stop the old one first, if it lives.
    """
    from gateway.backup.archive import Archive, read_identities
    from gateway.backup.restoration import Restoration

    settings = load({"home": home, "config": config})
    if identity_file is None:
        refuse("--identity: a backup is sealed; give the file with its key", status=2)

    async def work() -> None:
        found, own = Archive(archive), Home(settings.home)
        restoration = Restoration(
            found, found.find(name), read_identities(identity_file), own, settings.secret_key_file
        )
        own.create_root()
        lock = HomeLock.acquire(own)
        try:
            restoration.begin(allowed=(own.lock.name,))
            async with restored_database(settings, own) as database_url:
                await restoration.restore_database(database_url, click.echo)
                await restoration.restore_files(database_url)
            restoration.finish()
        finally:
            lock.release()
        click.echo(f"{own.root} is restored. Next:")
        for command in ("reconcile", "audit verify", "up"):
            click.echo(f"  tollgate {command} --home {shlex.quote(str(own.root))}")

    run_backup(work())


@backup.command()
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    required=True,
    help="Keep this many of the newest backups.",
)
@ARCHIVE
def prune(archive: Path, keep: int) -> None:
    """Remove all but the newest backups from ARCHIVE, and what only those that go need."""
    from gateway.backup.archive import Archive

    async def work() -> None:
        found = Archive(archive)
        with found.locked():
            backups, chunks = found.remove_but(keep)
        click.echo(f"{backups} backups and {chunks} chunks were removed.")

    run_backup(work())


@asynccontextmanager
async def source_of(
    settings: Settings, config: Path, pg_dump: Path | None
) -> AsyncIterator[Source]:
    """Yield what `create` reads, with its databases running."""
    from importlib.metadata import version

    from gateway.backup.creation import Source
    from gateway.backup.home_files import OutsideFile
    from gateway.cli.shared import administration
    from gateway.processes.embedded_databases import postgres_bin

    home = Home(settings.home)
    home.check()
    outside = [OutsideFile("tollgate.toml", config)]
    own_books = (path for path in settings.price_books if not path.is_relative_to(home.root))
    outside += [OutsideFile(f"price_books/{path.name}", path) for path in own_books]
    async with administration.database_urls(settings) as (database_url, _):
        yield Source(
            home=home,
            secret_file=settings.secret_key_file,
            database_url=database_url,
            pg_dump=pg_dump or postgres_bin() / "pg_dump",
            release=version("tollgate"),
            outside=tuple(outside),
        )


@asynccontextmanager
async def restored_database(settings: Settings, home: Home) -> AsyncIterator[str]:
    """Yield the URL of the database to restore into: the configured one, or an embedded one that
    runs as long as this context."""
    from gateway.processes.child_processes import end_leftovers
    from gateway.processes.embedded_databases import STOP_TIMEOUT_S, postgres_url, start_postgres

    home.create(is_restored=True)
    if settings.database_url is not None:
        yield settings.database_url
        return
    end_leftovers(home.run)
    postgres = await start_postgres(home)
    try:
        yield postgres_url(home)
    finally:
        await postgres.stop(STOP_TIMEOUT_S)


def run_backup(work: Coroutine[Any, Any, None]) -> None:
    """Run a command's coroutine; what backups raise by contract becomes one line, too."""
    import asyncpg

    from gateway.backup.errors import BackupError

    try:
        run(work)
    except BackupError as error:
        refuse(error, status=1)
    except asyncpg.PostgresError as error:
        refuse(f"Postgres: {error}", status=1)
