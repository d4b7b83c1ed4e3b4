"""`tollgate spool`: shows records of a spool that could not be billed, and ends each by a person's
decision, in the books and in the audit log."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gateway.cli.shared import tables
from gateway.cli.shared.command import JSON, connections, refuse, with_options, with_settings
from gateway.cli.shared.tables import Column, Output, with_output
from gateway.home import Home
from gateway.settings.load import Settings

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.events import UsageEvent
    from billing.ingestion.quarantined import KnownUsage, Verdict
    from billing.spool.quarantine import Outcome, Quarantine, QuarantinedRecord

NAME = click.argument("quarantined")
COLUMNS = (
    Column("QUARANTINED", "name"),
    Column("OUTCOME", "outcome"),
    Column("FOUND", "found", gives_way=True),
    Column("ORG", "organization", "id", gives_way=True),
    Column("PROJECT", "project", "id", gives_way=True),
    Column("MODEL", "model", gives_way=True),
    Column("REQUEST", "request", "id"),
    Column("USAGE", "usage"),
)
OUTCOMES: dict[Verdict, Outcome] = {"accept": "accepted", "discard": "discarded"}


@click.group()
def spool() -> None:
    """Show what a damaged spool could not bill, and bill it or write it off.

    QUARANTINED is a name that `tollgate reconcile` or `tollgate spool list` prints.
    """


@spool.command("list")
@with_settings
@with_output
@click.option("--all", "with_resolved", is_flag=True, help="List records that are settled, too.")
async def list_(settings: Settings, with_resolved: bool, output: Output) -> None:
    """List the quarantined records of this home, and what is known of each."""
    found = [
        to_fields(entry)
        for resolved in ((False, True) if with_resolved else (False,))
        for entry in quarantine_of(settings).entries(resolved=resolved)
    ]
    tables.show(found, COLUMNS, output, empty="No record waits for a person.")


@spool.command()
@with_settings
@with_options(JSON)
@NAME
async def show(settings: Settings, quarantined: str, as_json: bool) -> None:
    """Show what is known of a record, and what its acceptance would bill."""
    fields = to_fields(find(settings, quarantined))
    if as_json:
        click.echo(msgspec.json.encode(fields).decode())
        return
    for name, value in fields.items():
        click.echo(f"{name:<14}{'-' if value is None else value}")


@spool.command()
@with_settings
@NAME
async def accept(settings: Settings, quarantined: str) -> None:
    """Bill what is known of a record: what `show` says. Idempotent, and noted in the audit log."""
    await decide(settings, quarantined, "accept")


@spool.command()
@with_settings
@NAME
async def discard(settings: Settings, quarantined: str) -> None:
    """Write a record off: what is known of it is booked as waste, for which the house pays.

    Idempotent, and noted in the audit log.
    """
    await decide(settings, quarantined, "discard")


async def decide(settings: Settings, name: str, verdict: Verdict) -> None:
    """Carry out a verdict. The books and the audit log change together; a kill before the record
    leaves the quarantine is made good by a repeat, which finds the verdict in the log."""
    from billing.ingestion.quarantined import known_usage
    from billing.ingestion.settle_late import settle_late

    entry = find(settings, name)
    if entry.context.outcome in ("billed", "nothing_lost"):
        click.echo(f"{name} waits for nobody: {entry.context.outcome.replace('_', ' ')}.")
        return
    known = known_usage(entry)
    if verdict == "accept" and not known.events:
        refuse(f"{name}: nothing is known of it to be billed; discard it", status=2)
    async with connections(settings) as (db, _):
        async with db.begin() as conn:
            outcome, booked = await book_once(conn, name, known, verdict)
        await settle_late(db, booked)
    quarantine_of(settings).resolve(entry, outcome)
    click.echo(f"{name} is {outcome}{told(booked)}.")


async def book_once(
    conn: AsyncConnection, name: str, known: KnownUsage, verdict: Verdict
) -> tuple[Outcome, list[UsageEvent]]:
    """Book a verdict and note it in the audit log, unless one was noted before, which stands.

    Raises: click.ClickException if the record cannot be accepted.
    """
    import sqlalchemy as sa
    from sqlalchemy.exc import DBAPIError

    from billing.events import UsageEvent
    from billing.ingestion.quarantined import book
    from billing.ingestion.shipper import is_refusal
    from gateway.audit.log import COMMAND_LINE, record, record_for_both
    from gateway.audit.tables import entries
    from gateway.tenancy.orgs import find_operator
    from gateway.tenancy.tables import orgs

    await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(sa.func.hashtext(name))))
    operator = await find_operator(conn)
    if operator is None:
        raise click.ClickException("there is no operator's organization: run `tollgate migrate`")
    actions = {f"spool_record.{it}": it for it in OUTCOMES.values()}
    noted = await conn.scalar(
        sa.select(entries.c.action).where(
            entries.c.org_id == operator,
            entries.c.target == name,
            entries.c.action.in_(list(actions)),
        )
    )
    if noted is not None:
        return actions[noted], []
    owner, booked = None, list[UsageEvent]()
    try:
        async with conn.begin_nested():
            owner = await conn.scalar(sa.select(orgs.c.id).where(orgs.c.id == known.org))
            if owner is not None:
                booked = await book(conn, known, verdict)
    except (DBAPIError, ValueError, OverflowError) as error:
        if not is_refusal(error):
            raise
        if verdict == "accept":
            raise click.ClickException(f"{name}: Postgres refuses it; discard it") from error
    if owner is None and verdict == "accept":
        raise click.ClickException(f"{name}: no organization {known.org!r}; discard it")
    entry: dict[str, Any] = {
        "actor": COMMAND_LINE,
        "action": f"spool_record.{OUTCOMES[verdict]}",
        "target": name,
        "after": {"requests": known.requests, "model": known.model, "booked": to_amounts(booked)},
    }
    if owner is None:
        await record(conn, org_id=operator, **entry)
    else:
        await record_for_both(
            conn, org_id=owner, operator_org=operator, project_id=known.project, **entry
        )
    return OUTCOMES[verdict], booked


def quarantine_of(settings: Settings) -> Quarantine:
    from billing.spool.quarantine import Quarantine

    home = Home(settings.home)
    home.check()
    return Quarantine(home.spool)


def find(settings: Settings, name: str) -> QuarantinedRecord:
    entry = quarantine_of(settings).find(name)
    if entry is None:
        refuse(f"no quarantined record {name!r}; see `tollgate spool list --all`", status=2)
    return entry


def to_fields(entry: QuarantinedRecord) -> dict[str, Any]:
    """Return what is known of an entry, for people and scripts."""
    from billing.ingestion.quarantined import describe_usage, known_usage

    known, found_at = known_usage(entry), entry.context.found_at
    when = datetime.fromtimestamp(found_at, UTC).isoformat(" ", "seconds") if found_at else None
    return {
        "name": entry.name,
        "reason": entry.context.reason,
        "outcome": entry.context.outcome,
        "bytes": len(entry.data),
        "found": when,
        "request": " or ".join(known.requests) or None,
        "organization": known.org,
        "project": known.project,
        "model": known.model,
        "usage": describe_usage(known),
        "accept bills": to_amounts(known.events) or None,
    }


def to_amounts(events: tuple[UsageEvent, ...] | list[UsageEvent]) -> list[dict[str, Any]]:
    """Return what events cost, by component."""
    from billing.money import format_usd
    from billing.pricing.rating import rate

    return [
        {
            "event": event.id,
            "kind": event.kind,
            "quantities": {k: v for k, v in msgspec.to_builtins(event.quantities).items() if v},
            "usd": format_usd(rate(event.quantities, event.attempt.prices).amount_pico),
        }
        for event in events
    ]


def told(booked: list[UsageEvent]) -> str:
    """Say what was booked, behind a verdict."""
    if not booked:
        return "; nothing was booked anew"
    usd = " + ".join(each["usd"] for each in to_amounts(booked))
    return f"; {usd} USD are booked as {booked[0].kind}"
