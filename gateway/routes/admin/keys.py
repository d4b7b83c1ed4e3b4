"""/v1/admin/keys: API keys, with all that can be said of one. Our own routes; OpenAI's view of the
keys of a project is `/v1/organization/projects/{id}/api_keys`.

A secret stands in the answer to the request that made it, and in no other. An ETag speaks of what
is configured: that a key was used changes nothing that anybody could overwrite.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from litestar import Request, Response, get, patch, post
from litestar.params import FromPath

from foundation.structs import given
from gateway.audit.log import Actor
from gateway.auth.errors import MissingScope
from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ, may
from gateway.principal import Principal
from gateway.routes.shared.access import (
    PUBLIC,
    AuthenticatedRequest,
    actor_of,
    address_of,
    needs,
    services,
)
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import Precondition, answer, if_match, tag_of, tagged
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery, to_listing
from gateway.routes.shared.request_state import REQUEST_ID
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.keys.changes import Check, report_leak, rotate_key, update_key
from gateway.tenancy.keys.keys import (
    KEY_FORM,
    KeyRow,
    create_key,
    page_of_keys,
    retrieve_key,
    revoke_key,
)
from gateway.tenancy.keys.restrictions import Restrictions
from gateway.wire.admin.keys import (
    KeyCreate,
    KeyPatch,
    KeyRotate,
    KeyView,
    KeyWithSecret,
    LeakReport,
    from_seconds,
    to_patch,
    to_wire,
    to_wire_once,
)
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.refusals import decode_kept

SCOPE_ADMIN_KEYS = "admin:keys"
TAG = "API keys"
NO_STORE = {"cache-control": "no-store"}
MAX_REPORTS = 8
"""Reports of leaks looked up at once, in one process; the others wait, and nobody else does."""
REPORTER = Actor(kind="system", id="leak-report")


create_decoder = msgspec.json.Decoder(KeyCreate)
patch_decoder = msgspec.json.Decoder(KeyPatch)
rotate_decoder = msgspec.json.Decoder(KeyRotate)
report_decoder = msgspec.json.Decoder(LeakReport)
report_slots = asyncio.Semaphore(MAX_REPORTS)


class KeyQuery(PageQuery):
    project_id: str | None = None


@post(
    "/v1/admin/keys",
    opt=needs(SCOPE_ADMIN_KEYS),
    tags=[TAG],
    summary="Create an API key; only this answer shows its secret",
    operation_class=describes(body=KeyCreate, answer=KeyWithSecret, status=201, idempotent=True),
)
async def create(request: AuthenticatedRequest) -> Response[bytes]:
    wanted = decode_kept(create_decoder, await plain_body(request))
    check_given(request.user, wanted.scopes)
    found = services(request)
    pepper_id, pepper = found.authenticator.pepper
    own = {name: getattr(wanted, name) for name in Restrictions.__struct_fields__}
    own["model_limits"] = to_patch(wanted.model_limits)
    async with tenant(found.db, request.user.org_id) as conn:
        made = await create_key(
            conn,
            org_id=request.user.org_id,
            project_id=wanted.project_id,
            name=wanted.name,
            scopes=wanted.scopes,
            plan=wanted.plan,
            expires_at=from_seconds(wanted.expires_at),
            restrictions=Restrictions(**own),
            user_id=wanted.user_id,
            service_account_id=wanted.service_account_id,
            pepper=pepper,
            pepper_id=pepper_id,
            actor=actor_of(request),
            by=request.user,
        )
    return shown(to_wire_once(made.row, made.secret), status=201)


@get(
    "/v1/admin/keys",
    opt=needs(SCOPE_ADMIN_READ),
    tags=[TAG],
    summary="List the API keys",
    operation_class=describes(query=KeyQuery, answer=Listing[KeyView]),
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, KeyQuery)
    async with tenant(services(request).db, request.user.org_id) as conn:
        rows = await page_of_keys(
            conn,
            org_id=request.user.org_id,
            project_id=query.project_id,
            after=query.after,
            limit=query.limit + 1,
            descending=query.order == "desc",
        )
    return answer(request, to_listing([to_wire(row) for row in rows], query))


@get(
    "/v1/admin/keys/{key_id:str}",
    opt=needs(SCOPE_ADMIN_READ),
    tags=[TAG],
    summary="One API key",
    operation_class=describes(answer=KeyView),
)
async def retrieve(request: AuthenticatedRequest, key_id: FromPath[str]) -> Response[bytes]:
    async with tenant(services(request).db, request.user.org_id) as conn:
        row = await retrieve_key(conn, key_id, org_id=request.user.org_id)
    return shown(to_wire(row))


@patch(
    "/v1/admin/keys/{key_id:str}",
    opt=needs(SCOPE_ADMIN_KEYS),
    tags=[TAG],
    summary="Change what an API key may do",
    operation_class=describes(body=KeyPatch, answer=KeyView, conditional=True),
)
async def update(request: AuthenticatedRequest, key_id: FromPath[str]) -> Response[bytes]:
    changes = given(decode_kept(patch_decoder, await plain_body(request)))
    if "expires_at" in changes:
        changes["expires_at"] = from_seconds(changes["expires_at"])
    if "model_limits" in changes:
        changes["model_limits"] = to_patch(changes["model_limits"])
    check = allowed(request.user, if_match(request))
    if "scopes" in changes:
        check_given(request.user, changes["scopes"])
    found = services(request)
    row = await update_key(
        found.db,
        found.redis,
        key_id,
        changes,
        org_id=request.user.org_id,
        actor=actor_of(request),
        check=check,
        by=request.user,
    )
    return shown(to_wire(row))


@post(
    "/v1/admin/keys/{key_id:str}/rotate",
    opt=needs(SCOPE_ADMIN_KEYS),
    status_code=200,
    tags=[TAG],
    summary="Give an API key a new secret; the old one is good for a grace period",
    operation_class=describes(
        body=KeyRotate,
        body_required=False,
        answer=KeyWithSecret,
        idempotent=True,
        conditional=True,
    ),
)
async def rotate(request: AuthenticatedRequest, key_id: FromPath[str]) -> Response[bytes]:
    body = await plain_body(request)
    wanted = decode_kept(rotate_decoder, body) if body else KeyRotate()
    found = services(request)
    pepper_id, pepper = found.authenticator.pepper
    made = await rotate_key(
        found.db,
        found.redis,
        key_id,
        org_id=request.user.org_id,
        grace_s=wanted.grace_s,
        pepper=pepper,
        pepper_id=pepper_id,
        actor=actor_of(request),
        check=allowed(request.user, if_match(request)),
        by=request.user,
    )
    return shown(to_wire_once(made.row, made.secret))


@post(
    "/v1/admin/keys/{key_id:str}/revoke",
    opt=needs(SCOPE_ADMIN_KEYS),
    status_code=200,
    tags=[TAG],
    summary="Revoke an API key; every worker refuses it within a second",
    operation_class=describes(answer=KeyView, idempotent=True, conditional=True),
)
async def revoke(request: AuthenticatedRequest, key_id: FromPath[str]) -> Response[bytes]:
    found = services(request)
    row = await revoke_key(
        found.db,
        found.redis,
        key_id,
        org_id=request.user.org_id,
        actor=actor_of(request),
        check=allowed(request.user, if_match(request)),
    )
    return shown(to_wire(row))


@post(
    "/v1/admin/keys/report-leak",
    opt=PUBLIC,
    status_code=204,
    tags=[TAG],
    summary="Report an API key that was found in public: it is revoked at once",
    operation_class=describes(body=LeakReport, status=204),
)
async def report(request: Request[Any, Any, Any]) -> None:
    """Take a leaked key: needs no credential but the key itself, and tells nobody whether there was
    such a key."""
    wanted = decode_kept(report_decoder, await plain_body(request))
    if KEY_FORM.fullmatch(wanted.key) is None:
        raise InvalidField("key", "it has not the form of an API key")
    found = services(request)
    address = address_of(request)
    actor = msgspec.structs.replace(
        REPORTER,
        ip=None if address is None else str(address),
        request_id=request.scope.get("state", {}).get(REQUEST_ID),
    )
    async with report_slots:
        hashes = found.authenticator.hashes(wanted.key)
        await report_leak(found.system_db, found.redis, hashes, actor=actor)


def check_given(principal: Principal, scopes: list[str]) -> None:
    """Check that whoever makes a key gives away no admin right that they lack. Raises:
    MissingScope.

    What a key is for otherwise, inference and tools, may be given by whoever administers keys.
    """
    for scope in scopes:
        if scope.startswith(("admin:", "operator:", "usage:")) and not may(principal, scope):
            raise MissingScope(scope)


def allowed(principal: Principal, precondition: Precondition) -> Check:
    """Check that nobody takes over a key that may do more than they may: its new secret would be
    theirs."""

    def check(row: KeyRow) -> None:
        precondition.check(configured(to_wire(row)))
        check_given(principal, row.scopes)

    return check


def configured(key: KeyView) -> KeyView:
    return msgspec.structs.replace(key, last_used_at=None)


def shown(key: KeyView, *, status: int = 200) -> Response[bytes]:
    # The tag is that of the key without its secret: what a later If-Match is compared with.
    fields = {name: getattr(key, name) for name in KeyView.__struct_fields__}
    return tagged(key, tag_of(configured(KeyView(**fields))), status=status, headers=NO_STORE)


routes = [report, create, list_, retrieve, update, rotate, revoke]
