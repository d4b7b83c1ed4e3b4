"""/v1/admin/keys: API keys, with all that can be said of one. Our own routes; OpenAI's view of the
keys of a project is `/v1/organization/projects/{id}/api_keys`.

A secret stands in the answer to the request that made it, and in no other. An ETag speaks of what
is configured: that a key was used changes nothing that anybody could overwrite.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from litestar import Request, Response, post
from msgspec.structs import asdict

from gateway.audit.log import Actor
from gateway.auth.errors import MissingScope
from gateway.permissions import may
from gateway.principal import Principal
from gateway.routes.shared.access import PUBLIC, address_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.operations import describes
from gateway.routes.shared.request_state import REQUEST_ID
from gateway.routes.shared.resource import NO_STORE, AdminRequest, AdminResource
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.keys.changes import report_leak, rotate_key, update_key
from gateway.tenancy.keys.keys import (
    KEY_FORM,
    KeyRow,
    create_key,
    retrieve_key,
    revoke_key,
    select_keys,
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
from gateway.wire.shared.page_query import OrgPageQuery
from gateway.wire.shared.resource import read_body

MAX_REPORTS = 8
"""Reports of leaks looked up at once, in one process; the others wait, and nobody else does."""
REPORTER = Actor(kind="system", id="leak-report")

report_slots = asyncio.Semaphore(MAX_REPORTS)


class KeyQuery(OrgPageQuery):
    project_id: str | None = None


keys = AdminResource[KeyRow](
    path="/v1/admin/keys",
    id_name="key_id",
    tag="API keys",
    change=needs("admin:keys"),
    view=KeyView,
    show=to_wire,
    unsteady=("last_used_at",),
    headers=NO_STORE,
    checks_ids=False,
)

list_ = keys.list_all(
    "List the API keys",
    KeyQuery,
    select=lambda org_id, query: select_keys(org_id, project_id=query.project_id),
    row=KeyRow,
)

retrieve = keys.retrieve("One API key", retrieve_key)


@keys.create(
    "Create an API key; only this answer shows its secret", KeyCreate, answer=KeyWithSecret
)
async def create(request: AdminRequest, wanted: KeyCreate) -> Response[bytes]:
    check_given(request.user, wanted.scopes)
    pepper_id, pepper = request.services.authenticator.pepper
    values = asdict(wanted)
    own = {name: values.pop(name) for name in Restrictions.__struct_fields__}
    own["model_limits"] = to_patch(wanted.model_limits)
    values["expires_at"] = from_seconds(wanted.expires_at)
    async with request.transaction() as conn:
        made = await create_key(
            conn,
            org_id=request.org_id,
            restrictions=Restrictions(**own),
            pepper=pepper,
            pepper_id=pepper_id,
            actor=request.actor,
            by=request.user,
            **values,
        )
    return keys.respond_once(to_wire_once(made.row, made.secret), made.row, status=201)


@keys.update("Change what an API key may do", KeyPatch)
async def update(request: AdminRequest, changes: dict[str, Any]) -> KeyRow:
    if "expires_at" in changes:
        changes["expires_at"] = from_seconds(changes["expires_at"])
    if "model_limits" in changes:
        changes["model_limits"] = to_patch(changes["model_limits"])
    if "scopes" in changes:
        check_given(request.user, changes["scopes"])
    return await update_key(
        request.db, request.redis, request.id, changes, **allowed(request), by=request.user
    )


@keys.act(
    "/rotate",
    "Give an API key a new secret; the old one is good for a grace period",
    body=KeyRotate,
    body_required=False,
    answer=KeyWithSecret,
)
async def rotate(request: AdminRequest, wanted: KeyRotate) -> Response[bytes]:
    pepper_id, pepper = request.services.authenticator.pepper
    made = await rotate_key(
        request.db,
        request.redis,
        request.id,
        grace_s=wanted.grace_s,
        pepper=pepper,
        pepper_id=pepper_id,
        **allowed(request),
        by=request.user,
    )
    return keys.respond_once(to_wire_once(made.row, made.secret), made.row)


@keys.act("/revoke", "Revoke an API key; every worker refuses it within a second")
async def revoke(request: AdminRequest) -> KeyRow:
    return await revoke_key(request.db, request.redis, request.id, **allowed(request))


@post(
    "/v1/admin/keys/report-leak",
    opt=PUBLIC,
    status_code=204,
    tags=["API keys"],
    summary="Report an API key that was found in public: it is revoked at once",
    operation_class=describes(body=LeakReport, status=204),
)
async def report(request: Request[Any, Any, Any]) -> None:
    """Take a leaked key: needs no credential but the key itself, and tells nobody whether there was
    such a key."""
    wanted = read_body(await plain_body(request), LeakReport)
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


def allowed(request: AdminRequest) -> dict[str, Any]:
    """Return what a verb takes, with a check that nobody takes over a key that may do more than
    they may: its new secret would be theirs."""

    def check(row: KeyRow) -> None:
        request.check(row)
        check_given(request.user, row.scopes)

    return {**request.change, "check": check}


routes = [report, create, list_, retrieve, update, rotate, revoke]
