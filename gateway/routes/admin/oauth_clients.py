"""/v1/admin/oauth/clients and /v1/admin/oauth/grants: the applications of an org, and what its
users allowed them.

A secret stands in the answer to the request that made it, and in no other. Nobody makes a client
that may do more than they may themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from litestar import Response, delete, get, post
from litestar.params import FromPath
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway import permissions as policy
from gateway.auth.bearer.revocations import announcing, end_grant
from gateway.auth.errors import MissingScope
from gateway.auth.oauth.clients.metadata import (
    AUTHORIZATION_CODE,
    REFRESH_TOKEN,
    ClientMetadata,
    InvalidMetadata,
    from_document,
)
from gateway.auth.oauth.clients.store import (
    STRANGERS,
    Check,
    Client,
    CreatedClient,
    archive_client,
    create_client,
    get_client,
    rotate_secret,
    select_clients,
    to_clients,
    update_client,
)
from gateway.auth.oauth.tokens.consents import forget
from gateway.auth.oauth.tokens.grants import Grant, find_grant, select_grants, to_grants
from gateway.auth.tables import oauth_clients, oauth_grants
from gateway.db import tenant
from gateway.principal import Principal
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.browser import desk_of
from gateway.routes.shared.conditional import Precondition, answer, if_match, tag_of, tagged
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery, keyset, to_listing
from gateway.tenancy.changes import changing
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.member_tables import service_accounts
from gateway.wire.admin.oauth_clients import (
    ClientWritten,
    OAuthClient,
    OAuthClientOnce,
    OAuthGrant,
    SecretRotation,
)
from gateway.wire.organization.organization import to_unix, to_unix_or_none
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.refusals import decode_kept

SCOPE_ADMIN_CLIENTS = "admin:clients"
CLIENTS, GRANTS = "/v1/admin/oauth/clients", "/v1/admin/oauth/grants"
CLIENT, GRANT = CLIENTS + "/{client_id:str}", GRANTS + "/{grant_id:str}"
TAG = "OAuth clients"
NO_STORE = {"cache-control": "no-store"}

written_decoder = msgspec.json.Decoder(ClientWritten)
rotation_decoder = msgspec.json.Decoder(SecretRotation)


class ClientsQuery(PageQuery):
    include_archived: bool = False


class GrantsQuery(PageQuery):
    client_id: str | None = None
    user_id: str | None = None


def to_wire(client: Client) -> OAuthClient:
    return OAuthClient(**_fields(client))


def _fields(client: Client) -> dict[str, Any]:
    same = set(OAuthClient.__struct_fields__) & set(Client.__struct_fields__)
    return {
        **{name: getattr(client, name) for name in same},
        "created_at": to_unix_or_none(client.created_at),
        "archived_at": to_unix_or_none(client.archived_at),
        "client_name": client.name,
        "dpop_bound_access_tokens": client.dpop_bound,
    }


def to_grant(grant: Grant) -> OAuthGrant:
    same = set(OAuthGrant.__struct_fields__) & set(Grant.__struct_fields__)
    moments = {
        "created_at": to_unix(grant.created_at),
        "revoked_at": to_unix_or_none(grant.revoked_at),
    }
    return OAuthGrant(**{name: getattr(grant, name) for name in same} | moments)


def unless_changed(precondition: Precondition) -> Check:
    """Return a check that includes the version, which tells of a new secret that is shown to
    nobody."""
    return lambda client: precondition.check(to_wire(client), client.version)


def shown(request: AuthenticatedRequest, client: Client) -> Response[bytes]:
    return answer(request, to_wire(client), unseen=(client.version,))


def shown_once(made: CreatedClient, *, status: int = 200) -> Response[bytes]:
    """Answer with the tag of the client without its secret: what a later If-Match is compared
    with."""
    once = OAuthClientOnce(**_fields(made.client), client_secret=made.client_secret)
    tag = tag_of(to_wire(made.client), made.client.version)
    return tagged(once, tag, status=status, headers=NO_STORE)


def to_metadata(written: ClientWritten) -> ClientMetadata:
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
        return from_document(document)
    except InvalidMetadata as error:
        raise InvalidField(error.param, error.message) from error


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


@post(
    CLIENTS,
    opt=needs(SCOPE_ADMIN_CLIENTS),
    tags=[TAG],
    summary="Create an OAuth client; only this answer shows its secret",
    status_code=201,
    operation_class=describes(
        body=ClientWritten, answer=OAuthClientOnce, status=201, idempotent=True, conditional=False
    ),
)
async def create(request: AuthenticatedRequest) -> Response[bytes]:
    written = decode_kept(written_decoder, await plain_body(request))
    metadata = to_metadata(written)
    scopes = check_scopes(request.user, written.scopes)
    async with tenant(services(request).db, request.user.org_id) as conn:
        await check_account(conn, request.user, written.service_account_id)
        made = await create_client(
            conn,
            desk_of(request).clients.peppers,
            metadata=metadata,
            scopes=scopes,
            actor=actor_of(request),
            org_id=request.user.org_id,
            project_id=written.project_id,
            service_account_id=written.service_account_id,
            plan=written.plan,
            by=request.user,
        )
    return shown_once(made, status=201)


@get(
    CLIENTS,
    opt=needs(policy.SCOPE_ADMIN_READ),
    tags=[TAG],
    summary="List the OAuth clients",
    operation_class=describes(query=ClientsQuery, answer=Listing[OAuthClient]),
)
async def list_all(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, ClientsQuery)
    listed = select_clients(request.user.org_id, archived=query.include_archived)
    async with tenant(services(request).db, request.user.org_id) as conn:
        clients = to_clients(await conn.execute(keyset(listed, oauth_clients.c.id, query)))
    return answer(request, to_listing([to_wire(each) for each in clients], query))


@get(
    CLIENT,
    opt=needs(policy.SCOPE_ADMIN_READ),
    tags=[TAG],
    summary="One OAuth client",
    operation_class=describes(answer=OAuthClient, conditional=True),
)
async def retrieve(request: AuthenticatedRequest, client_id: FromPath[str]) -> Response[bytes]:
    async with tenant(services(request).db, request.user.org_id) as conn:
        client = await get_client(conn, org_id=request.user.org_id, client_id=client_id)
    return shown(request, client)


@post(
    CLIENT,
    opt=needs(SCOPE_ADMIN_CLIENTS),
    tags=[TAG],
    summary="Change an OAuth client: all of it is said again",
    status_code=200,
    operation_class=describes(
        body=ClientWritten, answer=OAuthClient, idempotent=True, conditional=True
    ),
)
async def update(request: AuthenticatedRequest, client_id: FromPath[str]) -> Response[bytes]:
    written = decode_kept(written_decoder, await plain_body(request))
    metadata, precondition = to_metadata(written), if_match(request)
    scopes = check_scopes(request.user, written.scopes)
    found, org_id = services(request), request.user.org_id
    async with changing(found.db, found.redis, client_id, org_id=org_id) as conn:
        await check_account(conn, request.user, written.service_account_id)
        client = await update_client(
            conn,
            org_id=org_id,
            client_id=client_id,
            metadata=metadata,
            scopes=scopes,
            actor=actor_of(request),
            project_id=written.project_id,
            service_account_id=written.service_account_id,
            plan=written.plan,
            check=unless_changed(precondition),
            by=request.user,
        )
    return shown(request, client)


@post(
    CLIENT + "/rotate-secret",
    opt=needs(SCOPE_ADMIN_CLIENTS),
    tags=[TAG],
    summary="Rotate the secret of an OAuth client; only this answer shows it",
    status_code=200,
    operation_class=describes(
        body=SecretRotation, answer=OAuthClientOnce, idempotent=True, conditional=True
    ),
)
async def rotate(request: AuthenticatedRequest, client_id: FromPath[str]) -> Response[bytes]:
    wanted = decode_kept(rotation_decoder, await plain_body(request) or b"{}")
    precondition, org_id = if_match(request), request.user.org_id
    desk = desk_of(request)

    def check(before: Client) -> None:
        # Whoever has its secret has its scopes.
        unless_changed(precondition)(before)
        check_scopes(request.user, before.scopes)

    async with tenant(services(request).db, org_id) as conn:
        known = await get_client(conn, org_id=org_id, client_id=client_id)
        await check_account(conn, request.user, known.service_account_id)
        made = await rotate_secret(
            conn,
            desk.clients.peppers,
            org_id=org_id,
            client_id=client_id,
            grace_s=wanted.grace_s,
            actor=actor_of(request),
            now=desk.clock(),
            check=check,
            by=request.user,
        )
    return shown_once(made)


@delete(
    CLIENT,
    opt=needs(SCOPE_ADMIN_CLIENTS),
    tags=[TAG],
    summary="Archive an OAuth client: what it was given ends",
    status_code=200,
    operation_class=describes(answer=OAuthClient, conditional=True),
)
async def archive(request: AuthenticatedRequest, client_id: FromPath[str]) -> Response[bytes]:
    precondition, org_id = if_match(request), request.user.org_id
    async with announcing(desk_of(request).redis) as announcement:
        async with tenant(services(request).db, org_id) as conn:
            client = await archive_client(
                conn,
                org_id=org_id,
                client_id=client_id,
                actor=actor_of(request),
                check=unless_changed(precondition),
            )
            await announcement.revoke(conn, org_id=org_id, kind="client", subject=client_id)
    return shown(request, client)


@get(
    GRANTS,
    opt=needs(policy.SCOPE_ADMIN_READ),
    tags=[TAG],
    summary="List what users allowed to clients",
    operation_class=describes(query=GrantsQuery, answer=Listing[OAuthGrant]),
)
async def list_grants(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, GrantsQuery)
    listed = select_grants(request.user.org_id, user_id=query.user_id, client_id=query.client_id)
    async with tenant(services(request).db, request.user.org_id) as conn:
        grants = to_grants(await conn.execute(keyset(listed, oauth_grants.c.id, query)))
    return answer(request, to_listing([to_grant(each) for each in grants], query))


@get(
    GRANT,
    opt=needs(policy.SCOPE_ADMIN_READ),
    tags=[TAG],
    summary="One grant",
    operation_class=describes(answer=OAuthGrant, conditional=True),
)
async def retrieve_grant(request: AuthenticatedRequest, grant_id: FromPath[str]) -> Response[bytes]:
    async with tenant(services(request).db, request.user.org_id) as conn:
        grant = await find_grant(conn, org_id=request.user.org_id, grant_id=grant_id)
    return answer(request, to_grant(grant))


@post(
    GRANT + "/revoke",
    opt=needs(SCOPE_ADMIN_CLIENTS),
    tags=[TAG],
    summary="End a grant: its tokens are refused within a second, and the user is asked again",
    status_code=200,
    operation_class=describes(answer=OAuthGrant, idempotent=True, conditional=True),
)
async def revoke(request: AuthenticatedRequest, grant_id: FromPath[str]) -> Response[bytes]:
    precondition, org_id = if_match(request), request.user.org_id
    async with announcing(desk_of(request).redis) as announcement:
        async with tenant(services(request).db, org_id) as conn:
            known = await find_grant(conn, org_id=org_id, grant_id=grant_id, lock=True)
            precondition.check(to_grant(known))
            await forget(
                conn,
                org_id=org_id,
                user_id=known.user_id,
                client_id=known.client_id,
                now=desk_of(request).clock(),
            )
            await end_grant(
                conn,
                announcement,
                org_id=org_id,
                grant_id=grant_id,
                because="administration",
                actor=actor_of(request),
            )
            grant = await find_grant(conn, org_id=org_id, grant_id=grant_id)
    return answer(request, to_grant(grant))


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
