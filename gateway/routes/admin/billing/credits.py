"""/v1/admin/credits and /v1/admin/balance: what an org has paid in advance. Operators give credit,
and take it back; who administers an org sees its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from litestar import Response, get, post
from litestar.params import FromPath

from billing.credits.balance import balance_of, owed_pico
from billing.credits.grants_admin import Credit, credits_of, open_credits, paid_pico, to_credit
from billing.invoices.balance import unapplied_pico
from billing.ledger.spend_totals import spent_by_org
from billing.money import format_usd, usd
from billing.tables import credit_grants, to_moment
from gateway.inference.services import GenerationServices
from gateway.limits.spending import counter_of
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.admin.billing.spend_caps import in_org
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import answer, if_match
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery, keyset, to_listing
from gateway.routes.shared.problem import MEDIA_TYPE, Problem
from gateway.routes.shared.resource import check_id, org_of
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.money.credits import create_credit, get_credit, take_back_credit
from gateway.tenancy.orgs import get_org
from gateway.wire.admin.billing.credits import BalanceView, CreditView, NewCredit
from gateway.wire.admin.billing.spend_caps import Id
from gateway.wire.admin.plans import to_seconds
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.page_query import OrgQuery
from gateway.wire.shared.refusals import decode_kept

SCOPE = "operator:orgs"
TAGS = ["Credits"]
_new_decoder = msgspec.json.Decoder(NewCredit)


class CreditsQuery(PageQuery):
    """`org_id`: for operators, another org than their own."""

    org_id: Id | None = None


def to_view(credit: Credit) -> CreditView:
    return CreditView(
        id=credit.id,
        amount_usd=format_usd(credit.amount_pico),
        left_usd=format_usd(credit.left_pico),
        pending_usd=format_usd(credit.leased_pico),
        priority=credit.priority,
        models=credit.models,
        components=credit.components,
        created_at=int(credit.created_at.timestamp()),
        expires_at=to_seconds(credit.expires_at),
        revoked_at=to_seconds(credit.revoked_at),
        ended_at=to_seconds(credit.ended_at),
    )


def refuse_unknown(models: Sequence[str], generation: GenerationServices) -> None:
    """Refuse a misspelt name: it would be money that pays for nothing. Raises: InvalidField."""
    served = {route.model for route in generation.fleet.routes}
    for index, model in enumerate(models):
        if model not in served and not generation.price_book.at(model, time.time()):
            raise InvalidField(f"models[{index}]", "no model that is served or priced is named so")


def tell(request: AuthenticatedRequest, org_id: str) -> None:
    """Announce that an org's credit has changed, and so what it may be leased."""
    counter = counter_of("org", org_id, "total", 0).key(org_id)
    services(request).generation.limiter.funds.has_changed((org_id, counter))


@post(
    "/v1/admin/credits",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Credit an organization with what it has paid in advance",
    operation_class=describes(body=NewCredit, answer=CreditView, status=201, idempotent=True),
)
async def create(request: AuthenticatedRequest) -> Response[bytes]:
    wanted, found = decode_kept(_new_decoder, await plain_body(request)), services(request)
    refuse_unknown(wanted.models or (), found.generation)
    made = await create_credit(
        found.system_db,
        org_id=wanted.org_id,
        amount_pico=usd(wanted.amount_usd),
        priority=wanted.priority,
        expires_at=to_moment(wanted.expires_at) if wanted.expires_at is not None else None,
        models=wanted.models,
        components=wanted.components,
        operator_org=request.user.org_id,
        actor=actor_of(request),
    )
    tell(request, wanted.org_id)
    return answer(request, to_view(made), status=201)


@get(
    "/v1/admin/credits/{credit_id:str}",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="One credit",
    operation_class=describes(query=OrgQuery, answer=CreditView),
)
async def retrieve(request: AuthenticatedRequest, credit_id: FromPath[str]) -> Response[bytes]:
    org_id, _ = in_org(request)
    check_id("credit_id", credit_id)
    async with services(request).system_db.connect() as conn:
        found = await get_credit(conn, org_id=org_id, credit_id=credit_id)
    return answer(request, to_view(found))


@post(
    "/v1/admin/credits/{credit_id:str}/revoke",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Take back what an organization has not spent of a credit",
    operation_class=describes(query=OrgQuery, answer=CreditView, idempotent=True, conditional=True),
)
async def revoke(request: AuthenticatedRequest, credit_id: FromPath[str]) -> Response[bytes]:
    org_id, _ = in_org(request)
    precondition = if_match(request)
    taken = await take_back_credit(
        services(request).system_db,
        check_id("credit_id", credit_id),
        org_id=org_id,
        operator_org=request.user.org_id,
        actor=actor_of(request),
        check=lambda credit: precondition.check(to_view(credit)),
    )
    tell(request, org_id)
    return answer(request, to_view(taken))


@get(
    "/v1/admin/credits",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="List the credits of an organization",
    operation_class=describes(query=CreditsQuery, answer=Listing[CreditView]),
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, CreditsQuery)
    org_id, _ = org_of(request.user, query.org_id)
    async with services(request).system_db.connect() as conn:
        rows = await conn.execute(keyset(credits_of(org_id), credit_grants.c.id, query))
        found = [to_view(to_credit(row)) for row in rows]
    return answer(request, to_listing(found, query))


@get(
    "/v1/admin/balance",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="What an organization was credited, has spent and owes, and what is left",
    operation_class=describes(
        query=OrgQuery, answer=BalanceView, said={404: {MEDIA_TYPE: Problem}}
    ),
)
async def balance(request: AuthenticatedRequest) -> Response[bytes]:
    org_id, _ = in_org(request)
    async with services(request).system_db.connect() as conn:
        # One moment for all figures, so that they add up.
        await conn.execution_options(isolation_level="REPEATABLE READ")
        org = await get_org(conn, org_id)
        found = await balance_of(conn, org_id)
        spent, paid = await spent_by_org(conn, org_id), await paid_pico(conn, org_id)
        owed, unapplied = await owed_pico(conn, org_id), await unapplied_pico(conn, org_id)
        credits = await open_credits(conn, org_id)
    view = BalanceView(
        org_id=org_id,
        prepaid=org.prepaid,
        credited_usd=format_usd(found.credited_pico),
        spent_usd=format_usd(spent),
        paid_by_credits_usd=format_usd(paid),
        unpaid_usd=format_usd(owed),
        unapplied_usd=format_usd(unapplied),
        pending_usd=format_usd(found.leased_pico),
        available_usd=format_usd(found.available_pico),
        left_usd=format_usd(found.left_pico),
        credits=[to_view(each) for each in credits],
    )
    return answer(request, view)


routes = [create, list_, retrieve, revoke, balance]
