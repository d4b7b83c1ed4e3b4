"""/v1/admin/credits and /v1/admin/balance: what an org has paid in advance. Operators give credit,
and take it back; who administers an org sees its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from msgspec.structs import asdict

from billing.credits.balance import balance_of, owed_pico
from billing.credits.grants_admin import Credit, credits_of, open_credits, paid_pico, to_credit
from billing.invoices.balance import unapplied_pico
from billing.ledger.spend_totals import spent_by_org
from billing.money import format_usd, usd
from billing.tables import to_moment
from gateway.inference.services import GenerationServices
from gateway.limits.spending import counter_of
from gateway.routes.shared.access import needs
from gateway.routes.shared.problem import MEDIA_TYPE, Problem
from gateway.routes.shared.resource import ActingRequest, AdminRequest, AdminResource
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.money.credits import create_credit, get_credit, take_back_credit
from gateway.tenancy.orgs import get_org
from gateway.wire.admin.billing.credits import BalanceView, CreditView, NewCredit
from gateway.wire.shared.page_query import OrgPageQuery
from gateway.wire.shared.resource import view_of


def to_view(credit: Credit) -> CreditView:
    return view_of(CreditView, credit, pending_usd=format_usd(credit.leased_pico))


credits = AdminResource[Credit](
    path="/v1/admin/credits",
    id_name="credit_id",
    tag="Credits",
    change=needs("operator:orgs"),
    view=CreditView,
    show=to_view,
    in_any_org=True,
    in_system=True,
)
balances = AdminResource[BalanceView](
    path="/v1/admin/balance", tag="Credits", view=BalanceView, in_any_org=True
)

list_ = credits.list_all(
    "List the credits of an organization",
    OrgPageQuery,
    select=lambda org_id, _query: credits_of(org_id),
    row=to_credit,
)

retrieve = credits.retrieve("One credit", get_credit)


def refuse_unknown(models: Sequence[str], generation: GenerationServices) -> None:
    """Refuse a misspelt name: it would be money that pays for nothing. Raises: InvalidField."""
    served = {route.model for route in generation.fleet.routes}
    for index, model in enumerate(models):
        if model not in served and not generation.price_book.at(model, time.time()):
            raise InvalidField(f"models[{index}]", "no model that is served or priced is named so")


def tell(request: ActingRequest, org_id: str) -> None:
    """Announce that an org's credit has changed, and so what it may be leased."""
    counter = counter_of("org", org_id, "total", 0).key(org_id)
    request.services.generation.limiter.funds.has_changed((org_id, counter))


# Whom a new one is for stands in its body.
@replace(credits, in_any_org=False).create(
    "Credit an organization with what it has paid in advance", NewCredit
)
async def create(request: AdminRequest, wanted: NewCredit) -> Credit:
    return await give_credit(request, wanted)


async def give_credit(request: ActingRequest, wanted: NewCredit) -> Credit:
    """Credit an organization, as an operator. Raises: InvalidField, NotFound."""
    refuse_unknown(wanted.models or (), request.services.generation)
    values = asdict(wanted)
    amount_usd, expires_at = values.pop("amount_usd"), values.pop("expires_at")
    made = await create_credit(
        request.system_db,
        amount_pico=usd(amount_usd),
        expires_at=None if expires_at is None else to_moment(expires_at),
        operator_org=request.user.org_id,
        actor=request.actor,
        **values,
    )
    tell(request, wanted.org_id)
    return made


@credits.act("/revoke", "Take back what an organization has not spent of a credit")
async def revoke(request: AdminRequest) -> Credit:
    taken = await take_back_credit(request.system_db, request.id, **request.operator_change)
    tell(request, request.org_id)
    return taken


@balances.get(
    "What an organization was credited, has spent and owes, and what is left",
    said={404: {MEDIA_TYPE: Problem}},
)
async def balance(request: AdminRequest) -> BalanceView:
    org_id = request.org_id
    async with request.system_db.connect() as conn:
        # One moment for all figures, so that they add up.
        await conn.execution_options(isolation_level="REPEATABLE READ")
        org = await get_org(conn, org_id)
        found = await balance_of(conn, org_id)
        spent, paid = await spent_by_org(conn, org_id), await paid_pico(conn, org_id)
        owed, unapplied = await owed_pico(conn, org_id), await unapplied_pico(conn, org_id)
        credits = await open_credits(conn, org_id)
    return view_of(
        BalanceView,
        found,
        org_id=org_id,
        prepaid=org.prepaid,
        spent_usd=format_usd(spent),
        paid_by_credits_usd=format_usd(paid),
        unpaid_usd=format_usd(owed),
        unapplied_usd=format_usd(unapplied),
        pending_usd=format_usd(found.leased_pico),
        credits=[to_view(each) for each in credits],
    )


routes = [create, list_, retrieve, revoke, balance]
