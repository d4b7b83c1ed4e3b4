"""/v1/admin/credits and /v1/admin/balance: what an org has paid in advance. Operators give credit;
who administers an org sees its own.

Above: `app`. Below: `tenancy.credits`, `billing.credits`, and what all of administration shares.
"""

from __future__ import annotations

import msgspec
from litestar import Response, get, post

from billing.credits import Credit, balance_of, credits_of, to_credit
from billing.money import format_usd, usd
from billing.tables import transfers
from gateway.auth.policy import SCOPE_ADMIN_READ
from gateway.routes.access import actor_of, needs, services
from gateway.routes.admin_spend_caps import Asked, OrgQuery, in_org, org_of
from gateway.routes.chat import plain_body
from gateway.routes.conditional import JSON, answer
from gateway.routes.operations import describes
from gateway.routes.pages import Listing, PageQuery, keyset, to_listing
from gateway.routes.problem import MEDIA_TYPE, Problem
from gateway.tenancy.credits import create_credit
from gateway.tenancy.orgs import get_org
from gateway.wire.admin_credits import BalanceView, CreditView, NewCredit
from gateway.wire.admin_spend_caps import Id
from gateway.wire.openai_admin import parse_query
from gateway.wire.refusals import decode

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
        created_at=int(credit.posted_at.timestamp()),
    )


@post(
    "/v1/admin/credits",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Credit an organization with what it has paid in advance",
    operation_class=describes(body=NewCredit, answer=CreditView, status=201, idempotent=True),
)
async def create(request: Asked) -> Response[bytes]:
    wanted, found = decode(_new_decoder, await plain_body(request)), services(request)
    made = await create_credit(
        found.system_db,
        found.redis,
        org_id=wanted.org_id,
        amount_pico=usd(wanted.amount_usd),
        operator_org=request.user.org_id,
        actor=actor_of(request),
    )
    return answer(request, to_view(made), status=201)


@get(
    "/v1/admin/credits",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="List the credits of an organization",
    operation_class=describes(query=CreditsQuery, answer=Listing[CreditView]),
)
async def list_(request: Asked) -> Response[bytes]:
    query = parse_query(request.url.query, CreditsQuery)
    org_id, _ = org_of(request, query.org_id)
    async with services(request).system_db.connect() as conn:
        rows = await conn.execute(keyset(credits_of(org_id), transfers.c.id, query))
        found = [to_view(to_credit(row)) for row in rows]
    return Response(msgspec.json.encode(to_listing(found, query)), media_type=JSON)


@get(
    "/v1/admin/balance",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="What an organization was credited, and what is left of it",
    operation_class=describes(
        query=OrgQuery, answer=BalanceView, said={404: {MEDIA_TYPE: Problem}}
    ),
)
async def balance(request: Asked) -> Response[bytes]:
    org_id, _ = in_org(request)
    async with services(request).system_db.connect() as conn:
        org = await get_org(conn, org_id)
        found = await balance_of(conn, org_id)
    view = BalanceView(
        org_id=org_id,
        prepaid=org.prepaid,
        credited_usd=format_usd(found.credited_pico),
        spent_usd=format_usd(found.spent_pico),
        left_usd=format_usd(found.credited_pico - found.spent_pico),
    )
    return answer(request, view)


routes = [create, list_, balance]
