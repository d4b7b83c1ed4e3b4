"""/v1/admin/issuers: the external issuers whose tokens and logins an org believes.

Who lists an issuer decides who everybody is: nobody gives by it a role or a scope that they do not
have themselves. A client secret is written and never read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Annotated

import msgspec
from litestar import Response, delete, get, post, put
from litestar.params import FromPath
from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.auth.errors import MissingScope
from gateway.auth.federation.external_login import redirect_uri_of
from gateway.auth.federation.issuers import (
    Issuer,
    Rules,
    archive_issuer,
    create_issuer,
    find_issuer,
    list_issuers,
    update_issuer,
)
from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ, may_appoint, may_give
from gateway.principal import SCOPE_ADMIN
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import Precondition, answer, if_match
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery
from gateway.tenancy.changes import changing
from gateway.tenancy.pages import Cursor
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.refusals import decode_kept

SCOPE = "admin:issuers"
PATH = "/v1/admin/issuers"
ONE = PATH + "/{issuer_id:str}"
NEW_SUBJECT = "issuer_new"
"""What is announced of an issuer that has no id yet."""


class IssuerBody(Rules, frozen=True, kw_only=True, forbid_unknown_fields=True):
    client_secret: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    """On a change: None keeps the one that is there."""


class IssuerView(Rules, frozen=True, kw_only=True):
    object: str = "issuer"
    id: str
    has_client_secret: bool
    redirect_uri: str
    """Ours, to be registered at the issuer for logins."""
    created_at: int
    """Unix seconds."""


class IssuerDeleted(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "issuer.deleted"
    id: str
    deleted: bool = True


DECODER = msgspec.json.Decoder(IssuerBody)


def to_view(request: AuthenticatedRequest, issuer: Issuer) -> IssuerView:
    rules = {name: getattr(issuer, name) for name in Rules.__struct_fields__}
    return IssuerView(
        **rules,
        id=issuer.id,
        has_client_secret=issuer.has_client_secret,
        redirect_uri=redirect_uri_of(services(request).authorization.issuer, issuer.id),
        created_at=int(issuer.created_at.timestamp()),
    )


def unless_changed(
    request: AuthenticatedRequest, precondition: Precondition
) -> Callable[[Issuer], None]:
    """Return a check that includes the client secret: another one, which nobody is shown, is a
    change too."""

    def check(current: Issuer) -> None:
        precondition.check(to_view(request, current), current.client_secret_digest)

    return check


def shown(
    request: AuthenticatedRequest,
    issuer: Issuer,
    *,
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> Response[bytes]:
    unseen = (issuer.client_secret_digest,)
    view = to_view(request, issuer)
    return answer(request, view, unseen=unseen, status=status, headers=headers)


async def read(request: AuthenticatedRequest) -> tuple[Rules, str | None]:
    """Raises: BadField; MissingScope where it would give away more than the caller has."""
    body = decode_kept(DECODER, await plain_body(request))
    principal = request.user
    appointed = {*body.roles.values(), body.default_role}
    if not may_give(principal, body.scopes) or not all(
        may_appoint(principal, role) for role in appointed if role is not None
    ):
        raise MissingScope(SCOPE_ADMIN)
    rules = Rules(**{name: getattr(body, name) for name in Rules.__struct_fields__})
    return rules, body.client_secret


def announced(
    request: AuthenticatedRequest, subject: str
) -> AbstractAsyncContextManager[AsyncConnection]:
    """Open a transaction of the caller's org, of which every worker hears."""
    found = services(request)
    return changing(found.db, found.redis, subject, org_id=request.user.org_id)


@get(
    PATH,
    opt=needs(SCOPE_ADMIN_READ),
    tags=["Issuers"],
    summary="List external issuers",
    operation_class=describes(query=PageQuery, answer=Listing[IssuerView]),
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, PageQuery)
    org_id = request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        cursor = Cursor(after=query.after, limit=query.limit, order=query.order)
        found, more = await list_issuers(conn, org_id=org_id, cursor=cursor)
    views = [to_view(request, each) for each in found]
    listing = Listing(
        data=views,
        first_id=views[0].id if views else None,
        last_id=views[-1].id if views else None,
        has_more=more,
    )
    return answer(request, listing)


@post(
    PATH,
    opt=needs(SCOPE),
    tags=["Issuers"],
    status_code=201,
    summary="List an external issuer",
    operation_class=describes(body=IssuerBody, answer=IssuerView, status=201, idempotent=True),
)
async def create(request: AuthenticatedRequest) -> Response[bytes]:
    rules, client_secret = await read(request)
    desk, org_id = services(request).federation, request.user.org_id
    async with announced(request, NEW_SUBJECT) as conn:
        made = await create_issuer(
            conn,
            desk.secrets,
            org_id=org_id,
            rules=rules,
            actor=actor_of(request),
            client_secret=client_secret,
            allow_loopback=desk.allow_loopback,
        )
    return shown(request, made, status=201, headers={"location": f"{PATH}/{made.id}"})


@get(
    ONE,
    opt=needs(SCOPE_ADMIN_READ),
    tags=["Issuers"],
    summary="Show an external issuer",
    operation_class=describes(answer=IssuerView),
)
async def show(request: AuthenticatedRequest, issuer_id: FromPath[str]) -> Response[bytes]:
    org_id = request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        found = await find_issuer(conn, org_id=org_id, issuer_id=issuer_id)
    return shown(request, found)


@put(
    ONE,
    opt=needs(SCOPE),
    tags=["Issuers"],
    summary="Change an external issuer",
    operation_class=describes(body=IssuerBody, answer=IssuerView, conditional=True),
)
async def change(request: AuthenticatedRequest, issuer_id: FromPath[str]) -> Response[bytes]:
    precondition = if_match(request)
    rules, client_secret = await read(request)
    desk, org_id = services(request).federation, request.user.org_id
    async with announced(request, issuer_id) as conn:
        changed = await update_issuer(
            conn,
            desk.secrets,
            org_id=org_id,
            issuer_id=issuer_id,
            rules=rules,
            actor=actor_of(request),
            client_secret=client_secret,
            allow_loopback=desk.allow_loopback,
            check=unless_changed(request, precondition),
        )
    return shown(request, changed)


@delete(
    ONE,
    opt=needs(SCOPE),
    tags=["Issuers"],
    status_code=200,
    summary="Stop believing an issuer",
    operation_class=describes(answer=IssuerDeleted, conditional=True),
)
async def archive(request: AuthenticatedRequest, issuer_id: FromPath[str]) -> Response[bytes]:
    precondition, org_id = if_match(request), request.user.org_id
    async with announced(request, issuer_id) as conn:
        await archive_issuer(
            conn,
            org_id=org_id,
            issuer_id=issuer_id,
            actor=actor_of(request),
            check=unless_changed(request, precondition),
        )
    return answer(request, IssuerDeleted(id=issuer_id))


routes = [list_, create, show, change, archive]
