"""`tollgate audit verify`: is the audit log what was recorded?

Where each chain stood when it was found whole is kept in HOME/audit_witness.json, out of Postgres'
reach.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from click.exceptions import Exit

from gateway.cli.shared.command import JSON, connections, with_options, with_settings
from gateway.home import Home
from gateway.settings.load import Settings

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from gateway.audit.verify import ChainPosition, Verdict


@click.group()
def audit() -> None:
    """Verify the audit log."""


@audit.command()
@with_settings
@with_options(JSON)
@click.option("--org", help="Check the log of one organization, by name or id. Default: of all.")
async def verify(settings: Settings, org: str | None, as_json: bool) -> None:
    """Find entries that were edited, taken out, put in, moved or cut off.

    Names the first bad entry of each organization and exits with 1. What is whole is noted in the
    home, and the next verification must find it again.
    """
    from gateway.audit import verify as verification

    path, broken = Home(settings.home).audit_witness, False
    async with connections(settings) as (db, _):
        org_ids = None if org is None else [await org_id_of(db, org)]
        witness = read_witness(path)
        async for verdict in verification.verify(db, dict(witness), org_ids=org_ids):
            click.echo(msgspec.json.encode(verdict) if as_json else to_line(verdict))
            if verdict.finding is None:
                witness[verdict.org_id] = verdict.standing
            else:
                broken = True
    write_witness(path, witness)
    if broken:
        raise Exit(1)


async def org_id_of(db: AsyncEngine, org: str) -> str:
    """Find an org by name or id: the name of an archived one may have been given again.

    Raises: NotFound.
    """
    from gateway.tenancy.orgs import find_org

    if org.startswith("org_"):
        return org
    async with db.connect() as conn:
        return (await find_org(conn, name=org)).id


def to_line(verdict: Verdict) -> str:
    finding = verdict.finding
    if finding is None:
        return f"{verdict.org_id}  whole, {verdict.standing.sequence} entries"
    named = "" if finding.id is None else f" ({finding.id})"
    return f"{verdict.org_id}  BROKEN at entry {finding.sequence}{named}: {finding.problem}"


def read_witness(path: Path) -> dict[str, ChainPosition]:
    """Read the file. Raises: OSError, click.ClickException if it is no such file."""
    from gateway.audit.verify import ChainPosition

    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, ChainPosition])
    except msgspec.DecodeError as error:
        raise click.ClickException(f"{path}: {error}") from None


def write_witness(path: Path, witness: dict[str, ChainPosition]) -> None:
    """Write the file whole or not at all. Raises: OSError."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(witness)) + b"\n")
    beside.replace(path)
