"""`tollgate reconcile`: checks that engines, spools, ledger, rollups and invoices agree."""

from __future__ import annotations

import sys

import click

from gateway.cli.command import STATE, run, with_options
from gateway.home import Home
from gateway.settings.file import Flags
from gateway.settings.load import load


@click.command()
@with_options(*STATE)
def reconcile(**flags: Flags) -> None:
    """Check the books, while `tollgate up` runs or not.

    What engines generated was billed or is the house's waste, in the books or in a spool on the way
    there; every balance is the sum of its entries, every hour that of its events, every invoice
    what it charges. Prints what is not so, a line each, with the first request that differs, and
    exits with 1. What nobody can know any more is printed as unknown.
    """
    from billing.reconciliation.agreement import Agreement, agree
    from gateway.bookkeeping.engine_counts import engine_counts
    from gateway.cli import administration

    settings = load(flags)
    home = Home(settings.home)

    found = Agreement()

    async def work() -> None:
        nonlocal found
        async with administration.connections(settings) as (db, _):
            found = await agree(db, home.spool, lambda: engine_counts(home, settings.models))

    run(work())
    for problem in found.problems:
        click.echo(problem)
    for line in found.unknown:
        click.echo(f"unknown: {line}")
    if found.num_waiting:
        click.echo(f"{found.num_waiting} events are on their way to the books.")
    if found.problems:
        sys.exit(1)
    click.echo("The books balance.")
