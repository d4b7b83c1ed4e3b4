"""/v1/admin/issuers: the external issuers whose tokens and logins an org believes.

Who lists an issuer decides who everybody is: nobody gives by it a role or a scope that they do not
have themselves. A client secret is written and never read.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Response
from msgspec import Meta

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
from gateway.permissions import may_appoint, may_give
from gateway.principal import SCOPE_ADMIN
from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminRequest, AdminResource, to_cursor
from gateway.tenancy.named_urls import check_url
from gateway.wire.shared.page_query import PageQuery
from gateway.wire.shared.resource import view_of

NEW_SUBJECT = "issuer_new"
"""The subject that is announced of an issuer that has no id yet."""
IssuerHere = tuple[Issuer, str]
"""An issuer, and the address of our authorization server."""


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


def to_view(found: IssuerHere) -> IssuerView:
    issuer, own_issuer = found
    return view_of(IssuerView, issuer, redirect_uri=redirect_uri_of(own_issuer, issuer.id))


issuers = AdminResource[IssuerHere](
    path="/v1/admin/issuers",
    id_name="issuer_id",
    tag="Issuers",
    change=needs("admin:issuers"),
    view=IssuerView,
    show=to_view,
    # Another client secret, which nobody is shown, is a change too.
    unseen=lambda found: (found[0].client_secret_digest,),
    checks_ids=False,
)


def here(request: AdminRequest, issuer: Issuer) -> IssuerHere:
    return issuer, request.services.authorization.issuer


def to_values(request: AdminRequest, body: IssuerBody) -> dict[str, Any]:
    """Return what verbs take of a body. Raises: MissingScope where it would give away more than
    the caller has."""
    principal = request.user
    appointed = {*body.roles.values(), body.default_role}
    if not may_give(principal, body.scopes) or not all(
        may_appoint(principal, role) for role in appointed if role is not None
    ):
        raise MissingScope(SCOPE_ADMIN)
    rules = Rules(**{name: getattr(body, name) for name in Rules.__struct_fields__})
    loopback = request.services.federation.allow_loopback
    return {"rules": rules, "client_secret": body.client_secret, "allow_loopback": loopback}


@issuers.page("List external issuers", PageQuery)
async def list_(request: AdminRequest, query: PageQuery) -> tuple[list[IssuerHere], bool]:
    async with request.transaction() as conn:
        found, more = await list_issuers(conn, org_id=request.org_id, cursor=to_cursor(query))
    return [here(request, each) for each in found], more


@issuers.create("List an external issuer", IssuerBody)
async def create(request: AdminRequest, body: IssuerBody) -> Response[bytes]:
    values = to_values(request, body)
    federation = request.services.federation
    cipher = federation.secrets
    await check_url(federation.named_urls, "issuer", body.issuer)
    async with request.announced(NEW_SUBJECT) as conn:
        made = await create_issuer(
            conn, cipher, org_id=request.org_id, actor=request.actor, **values
        )
    response = issuers.respond(request.http, here(request, made), 201)
    response.headers["location"] = f"{issuers.path}/{made.id}"
    return response


@issuers.get("Show an external issuer")
async def show(request: AdminRequest) -> IssuerHere:
    async with request.transaction() as conn:
        return here(request, await find_issuer(conn, **request.where))


@issuers.replace("Change an external issuer", IssuerBody)
async def change(request: AdminRequest, body: IssuerBody) -> IssuerHere:
    values = to_values(request, body)
    cipher = request.services.federation.secrets
    async with request.announced(request.id) as conn:
        changed = await update_issuer(
            conn,
            cipher,
            **request.where,
            actor=request.actor,
            check=lambda current: request.check(here(request, current)),
            **values,
        )
    return here(request, changed)


@issuers.delete("Stop believing an issuer", answer=IssuerDeleted)
async def archive(request: AdminRequest) -> IssuerDeleted:
    async with request.announced(request.id) as conn:
        await archive_issuer(
            conn,
            **request.where,
            actor=request.actor,
            check=lambda current: request.check(here(request, current)),
        )
    return IssuerDeleted(id=request.id)


routes = [list_, create, show, change, archive]
