"""`tollgate billing`: prices a period anew, shown first and then applied; makes a draft final at
once. `tollgate reconcile`: checks that engines, spools, ledger, rollups and invoices agree."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import click
import msgspec
from click.exceptions import Exit

from gateway.cli.money.prices import book_of
from gateway.cli.shared.command import JSON, connections, with_options, with_settings
from gateway.home import Home
from gateway.settings.load import Settings

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from billing.corrections.rerating import LineChange, Rerating, ReratingPlan
    from billing.invoices.invoice import Invoice

MOMENT = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%SZ"])


@click.group()
def billing() -> None:
    """Price a period anew, or make a draft of an invoice final at once."""


@billing.command()
@with_settings
@with_options(JSON)
@click.option("--org", required=True, help="The organization whose usage is priced anew.")
@click.option("--from", "start", type=MOMENT, required=True, help="The period's first moment, UTC.")
@click.option("--to", "end", type=MOMENT, required=True, help="The moment after the period, UTC.")
@click.option("--model", help="Price only the usage of this model. Default: of all models.")
@click.option("--price-list", help="Price by this list. Default: the list it was admitted by.")
@click.option(
    *("--apply", "digest"),
    metavar="DIGEST",
    help="Apply the plan that was shown with this digest. Repeat it after a crash to finish.",
)
async def rerate(
    settings: Settings,
    org: str,
    start: datetime,
    end: datetime,
    model: str | None,
    price_list: str | None,
    digest: str | None,
    as_json: bool,
) -> None:
    """Show what a period would cost by the prices of today's book, or apply what was shown.

    What is on a final invoice stays there: the difference joins the next one. Events that wait for
    a price are priced, if the book has one by now.
    """
    from billing.corrections.rerating import ReratingScope, apply, plan
    from gateway.audit.log import record
    from gateway.limits.recounts import recounting
    from gateway.tenancy.orgs import find_org

    async def note(conn: AsyncConnection, begun: Rerating) -> None:
        from gateway.audit.log import COMMAND_LINE

        await record(
            conn,
            org_id=begun.span.org_id,
            actor=COMMAND_LINE,
            action="rerating.created",
            target=begun.id,
            after={"digest": begun.digest, "num_events": begun.num_events},
        )

    book = book_of(settings)
    async with connections(settings) as (db, redis):
        async with db.connect() as conn:
            found = await find_org(conn, name=org)
        span = ReratingScope(
            org_id=found.id,
            start=start.replace(tzinfo=UTC),
            end=end.replace(tzinfo=UTC),
            model=model,
            price_list=price_list,
        )
        if digest is None:
            show(await plan(db, span, book), as_json)
            return
        async with recounting(db, redis) as announce:
            rerating = await apply(db, span, book, digest, note=note, announce=announce)
    show_result(rerating, as_json)


@billing.command()
@with_settings
@click.option("--org", required=True, help="The organization that the draft is for.")
@click.argument("invoice_id")
async def finalize(settings: Settings, org: str, invoice_id: str) -> None:
    """Make a draft final with the usage it has now; later usage joins the next invoice."""
    from billing.invoices import closing
    from gateway.audit.log import record
    from gateway.tenancy.orgs import find_org

    async def on_final(conn: AsyncConnection, final: Invoice) -> None:
        from gateway.audit.log import COMMAND_LINE

        await record(
            conn,
            org_id=final.org_id,
            actor=COMMAND_LINE,
            action="invoice.finalized",
            target=final.id,
            after={"number": final.number},
        )

    async with connections(settings) as (db, _):
        async with db.connect() as conn:
            found = await find_org(conn, name=org)
        now = datetime.now(UTC)
        final = await closing.finalize(
            db, org_id=found.id, invoice_id=invoice_id, now=now, on_final=on_final
        )
    click.echo(f"{final.id} is invoice {final.number}.")


@click.command()
@with_settings
async def reconcile(settings: Settings) -> None:
    """Check the books, while `tollgate up` runs or not.

    What engines generated was billed or is the house's waste, in the books or in a spool on the way
    there; every balance is the sum of its entries, every hour that of its events, every invoice
    what it charges. Prints what is not so, a line each, with the first request that differs, and
    exits with 1. What nobody can know any more is printed as unknown.
    """
    from billing.reconciliation.agreement import agree
    from gateway.bookkeeping.engine_counts import engine_counts

    home = Home(settings.home)
    async with connections(settings) as (db, _):
        shares = settings.cell is not None
        counts = partial(engine_counts, home, settings.models, shares_books=shares)
        found = await agree(db, home.spool, counts)
    for problem in found.problems:
        click.echo(problem)
    for line in found.unknown:
        click.echo(f"unknown: {line}")
    if found.num_waiting:
        click.echo(f"{found.num_waiting} events are on their way to the books.")
    if found.problems:
        raise Exit(1)
    click.echo("The books balance.")


def show(plan: ReratingPlan, as_json: bool) -> None:
    from billing.money import format_usd
    from gateway.wire.admin.billing.reratings import to_preview

    if as_json:
        click.echo(msgspec.json.encode(to_preview(plan)).decode())
        return
    for line in plan.lines:
        click.echo(to_text(line))
    if plan.num_unpriced:
        click.echo(f"{plan.num_unpriced} events stay as they are: not all of it has a price.")
    if not plan.num_events:
        click.echo("Nothing differs.")
        return
    click.echo(f"{plan.num_events} events, in all {format_usd(plan.difference_pico)} USD.")
    click.echo(f"Digest: {plan.digest}")


def to_text(line: LineChange) -> str:
    from billing.money import format_usd

    amounts = (line.before_pico, line.after_pico, line.difference_pico)
    before, after, difference = map(format_usd, amounts)
    where = " ".join((line.project, line.model, line.tier, line.component))
    return (
        f"{line.invoice or 'not invoiced'}: {where}: {line.quantity} in {line.num_events} events,"
        f" {before} -> {after} USD ({difference}),"
        f" {line.price_before or 'no price'} -> {line.price_after or 'no price'}"
    )


def show_result(rerating: Rerating, as_json: bool) -> None:
    from gateway.wire.admin.billing.reratings import to_view

    if as_json:
        click.echo(msgspec.json.encode(to_view(rerating)).decode())
        return
    click.echo(f"{rerating.num_applied} events are priced anew.")
    others = rerating.num_events - rerating.num_applied
    if others:
        click.echo(f"{others} were priced otherwise since they were shown, and stay so.")
