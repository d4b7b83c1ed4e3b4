"""/v1/admin/oauth/clients and /v1/admin/oauth/grants: the applications of an org, and what its
users allowed them.

A secret stands in the answer to the request that made it, and in no other. Nobody makes a client
that may do more than they may themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from litestar import Response
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import permissions as policy
from gateway.auth.bearer.revocations import announcing, end_grant
from gateway.auth.errors import MissingScope
from gateway.auth.oauth.clients.metadata import (
    AUTHORIZATION_CODE,
    REFRESH_TOKEN,
    ClientMetadata,
    InvalidMetadata,
    check_urls,
    from_document,
)
from gateway.auth.oauth.clients.store import (
    STRANGERS,
    Client,
    CreatedClient,
    archive_client,
    create_client,
    get_client,
    rotate_secret,
    select_clients,
    update_client,
)
from gateway.auth.oauth.tokens.consents import forget
from gateway.auth.oauth.tokens.grants import Grant, find_grant, select_grants
from gateway.net.egress import Egress
from gateway.principal import Principal
from gateway.routes.shared.access import needs
from gateway.routes.shared.browser import auth_of
from gateway.routes.shared.resource import AdminRequest, AdminResource
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.member_tables import service_accounts
from gateway.wire.admin.oauth_clients import (
    ClientWritten,
    OAuthClient,
    OAuthClientOnce,
    OAuthGrant,
    SecretRotation,
)
from gateway.wire.shared.page_query import ArchivedPageQuery, PageQuery
from gateway.wire.shared.resource import view_of


class GrantsQuery(PageQuery):
    client_id: str | None = None
    user_id: str | None = None


def to_wire(client: Client) -> OAuthClient:
    return view_of(
        OAuthClient,
        client,
        client_name=client.name,
        dpop_bound_access_tokens=client.dpop_bound,
    )


clients = AdminResource[Client](
    path="/v1/admin/oauth/clients",
    id_name="client_id",
    tag="OAuth clients",
    change=needs("admin:clients"),
    view=OAuthClient,
    show=to_wire,
    # A new secret, which nobody is shown, is another version.
    unseen=lambda client: (client.version,),
    checks_ids=False,
)
grants = AdminResource[Grant](
    path="/v1/admin/oauth/grants",
    id_name="grant_id",
    tag="OAuth clients",
    change=needs("admin:clients"),
    view=OAuthGrant,
    show=lambda grant: view_of(OAuthGrant, grant),
    checks_ids=False,
)


def respond_once(made: CreatedClient, *, status: int = 200) -> Response[bytes]:
    once = view_of(OAuthClientOnce, to_wire(made.client), client_secret=made.client_secret)
    return clients.respond_once(once, made.client, status=status)


async def to_metadata(written: ClientWritten, egress: Egress) -> ClientMetadata:
    """Raises: InvalidField."""
    document = {
        name: getattr(written, name)
        for name in ClientWritten.__struct_fields__
        if name in ClientMetadata.__struct_fields__
    }
    if document["grant_types"] is None:
        document["grant_types"] = [AUTHORIZATION_CODE, REFRESH_TOKEN]
    if AUTHORIZATION_CODE not in document["grant_types"]:
        document["response_types"] = []
    try:
        metadata = from_document(document)
        await check_urls(metadata, egress)
    except InvalidMetadata as error:
        raise InvalidField(error.param, error.message) from error
    return metadata


def check_scopes(principal: Principal, wanted: Sequence[str] | None) -> list[str]:
    """Raises: InvalidField, MissingScope."""
    if wanted is None:
        return sorted(each for each in STRANGERS if policy.may_give(principal, [each]))
    scopes = sorted(set(wanted))
    for scope in scopes:
        if scope not in policy.SCOPES:
            raise InvalidField("scopes", "names a scope that there is not")
        if not policy.may_give(principal, [scope]):
            raise MissingScope(scope)
    return scopes


async def check_account(
    conn: AsyncConnection, principal: Principal, service_account_id: str | None
) -> None:
    """Check that the caller may appoint the service account that a client is to act for.

    Raises: MissingScope.
    """
    if service_account_id is None:
        return
    found = sa.select(service_accounts.c.role).where(service_accounts.c.id == service_account_id)
    role = await conn.scalar(found.where(service_accounts.c.org_id == principal.org_id))
    if role is not None and not policy.may_appoint(principal, role):
        raise MissingScope(policy.ADMIN + "*")


def to_owners(written: ClientWritten) -> dict[str, Any]:
    return {name: getattr(written, name) for name in ("project_id", "service_account_id", "plan")}


list_all = clients.list_all(
    "List the OAuth clients",
    ArchivedPageQuery,
    select=lambda org_id, query: select_clients(org_id, archived=query.include_archived),
    row=Client,
    name="list_all",
)

retrieve = clients.retrieve("One OAuth client", get_client)


@clients.create(
    "Create an OAuth client; only this answer shows its secret",
    ClientWritten,
    answer=OAuthClientOnce,
)
async def create(request: AdminRequest, written: ClientWritten) -> Response[bytes]:
    metadata = await to_metadata(written, request.services.federation.named_urls)
    scopes = check_scopes(request.user, written.scopes)
    async with request.transaction() as conn:
        await check_account(conn, request.user, written.service_account_id)
        made = await create_client(
            conn,
            auth_of(request.http).clients.peppers,
            metadata=metadata,
            scopes=scopes,
            actor=request.actor,
            org_id=request.org_id,
            **to_owners(written),
            by=request.user,
        )
    return respond_once(made, status=201)


@clients.replace("Change an OAuth client: all of it is said again", ClientWritten, method="POST")
async def update(request: AdminRequest, written: ClientWritten) -> Client:
    metadata = await to_metadata(written, request.services.federation.named_urls)
    scopes = check_scopes(request.user, written.scopes)
    async with request.announced(request.id) as conn:
        await check_account(conn, request.user, written.service_account_id)
        return await update_client(
            conn,
            **request.where,
            actor=request.actor,
            check=request.check,
            metadata=metadata,
            scopes=scopes,
            **to_owners(written),
            by=request.user,
        )


@clients.act(
    "/rotate-secret",
    "Rotate the secret of an OAuth client; only this answer shows it",
    body=SecretRotation,
    body_required=False,
    answer=OAuthClientOnce,
)
async def rotate(request: AdminRequest, wanted: SecretRotation) -> Response[bytes]:
    auth = auth_of(request.http)

    def check(before: Client) -> None:
        # Whoever has its secret has its scopes.
        request.check(before)
        check_scopes(request.user, before.scopes)

    async with request.transaction() as conn:
        known = await get_client(conn, **request.where)
        await check_account(conn, request.user, known.service_account_id)
        made = await rotate_secret(
            conn,
            auth.clients.peppers,
            **request.where,
            grace_s=wanted.grace_s,
            actor=request.actor,
            now=auth.clock(),
            check=check,
            by=request.user,
        )
    return respond_once(made)


@clients.delete("Archive an OAuth client: what it was given ends")
async def archive(request: AdminRequest) -> Client:
    async with announcing(auth_of(request.http).redis) as announcement:
        async with request.transaction() as conn:
            client = await archive_client(
                conn, **request.where, actor=request.actor, check=request.check
            )
            await announcement.revoke(
                conn, org_id=request.org_id, kind="client", subject=request.id
            )
    return client


list_grants = grants.list_all(
    "List what users allowed to clients",
    GrantsQuery,
    select=lambda org_id, query: select_grants(
        org_id, user_id=query.user_id, client_id=query.client_id
    ),
    row=Grant,
    name="list_grants",
)

retrieve_grant = grants.retrieve("One grant", find_grant, name="retrieve_grant")


@grants.act(
    "/revoke", "End a grant: its tokens are refused within a second, and the user is asked again"
)
async def revoke(request: AdminRequest) -> Grant:
    auth, org_id = auth_of(request.http), request.org_id
    async with announcing(auth.redis) as announcement:
        async with request.transaction() as conn:
            known = await find_grant(conn, **request.where, lock=True)
            request.check(known)
            user_id, client_id = known.user_id, known.client_id
            await forget(
                conn, org_id=org_id, user_id=user_id, client_id=client_id, now=auth.clock()
            )
            await end_grant(
                conn,
                announcement,
                **request.where,
                because="administration",
                actor=request.actor,
            )
            return await find_grant(conn, **request.where)


routes = [
    create,
    list_all,
    retrieve,
    update,
    rotate,
    archive,
    list_grants,
    retrieve_grant,
    revoke,
]
