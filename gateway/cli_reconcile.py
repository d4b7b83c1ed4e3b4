"""`tollgate reconcile`: do the books balance?

Above: `cli`. Below: `command`, and `billing.ledger`, imported where the command runs. It reads
Postgres alone: what is still in a spool has not come to the books yet.
"""

from __future__ import annotations

import sys

import click

from gateway.command import STATE, Flags, run, with_options
from gateway.settings import load


@click.command()
@with_options(*STATE)
def reconcile(**flags: Flags) -> None:
    """Check the ledger, while `tollgate up` runs or not.

    Every transfer has two legs of one amount, every balance is the sum of its entries, and every
    hour's rollup is that of its events. Prints what is not so, a line each, and exits with 1.
    """
    from billing.ledger import check
    from gateway import administration

    settings = load(flags)
    problems: list[str] = []

    async def work() -> None:
        async with administration.connections(settings) as (db, _):
            problems.extend(await check(db))

    run(work())
    for problem in problems:
        click.echo(problem)
    if problems:
        sys.exit(1)
    click.echo("The books balance.")
