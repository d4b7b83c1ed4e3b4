"""/v1/admin/webhooks: where an organization's events are sent, and what became of each.

A secret stands in the answer to the request that drew it, and in no other.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from litestar import Response, get, patch, post
from litestar.params import FromPath

from foundation.structs import given
from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.shared.access import AuthenticatedRequest, actor_of, needs, services
from gateway.routes.shared.body import plain_body
from gateway.routes.shared.conditional import Precondition, answer, if_match, tag_of, tagged
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery, keyset, to_listing
from gateway.webhooks import deliveries, endpoints
from gateway.webhooks.deliveries import DeliveryRecord
from gateway.webhooks.endpoints import Check, EndpointOnce, EndpointRecord
from gateway.webhooks.tables import deliveries as deliveries_table
from gateway.webhooks.tables import endpoints as endpoints_table
from gateway.wire.admin.oauth_clients import SecretRotation
from gateway.wire.admin.plans import to_seconds
from gateway.wire.admin.webhooks import (
    DeliveryState,
    NewWebhookEndpoint,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookEndpointOnce,
    WebhookEndpointPatch,
)
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.refusals import decode_kept

SCOPE = "admin:billing"
WEBHOOKS = "/v1/admin/webhooks"
WEBHOOK = WEBHOOKS + "/{endpoint_id:str}"
DELIVERIES = WEBHOOK + "/deliveries"
DELIVERY = DELIVERIES + "/{delivery_id:str}"
TAGS = ["Webhooks"]
NO_STORE = {"cache-control": "no-store"}

_new_decoder = msgspec.json.Decoder(NewWebhookEndpoint)
_patch_decoder = msgspec.json.Decoder(WebhookEndpointPatch)
_rotation_decoder = msgspec.json.Decoder(SecretRotation)


class WebhooksQuery(PageQuery):
    include_archived: bool = False


class DeliveriesQuery(PageQuery):
    state: DeliveryState | None = None


def to_wire(endpoint: EndpointRecord) -> WebhookEndpoint:
    return WebhookEndpoint(**_fields(endpoint))


def _fields(endpoint: EndpointRecord) -> dict[str, Any]:
    moments = ("older_secret_expires_at", "created_at", "disabled_at", "archived_at")
    return {
        **{name: getattr(endpoint, name) for name in ("id", "url", "event_types", "description")},
        **{name: to_seconds(getattr(endpoint, name)) for name in moments},
        "enabled": endpoint.disabled_at is None,
    }


def to_delivery(delivery: DeliveryRecord) -> WebhookDelivery:
    same = set(WebhookDelivery.__struct_fields__) & set(DeliveryRecord.__struct_fields__)
    fields = {name: getattr(delivery, name) for name in same}
    fields |= {name: to_seconds(fields[name]) for name in ("expires_at", "created_at", "ended_at")}
    waits = delivery.state == deliveries.PENDING
    return WebhookDelivery(
        **fields,
        next_attempt_at=to_seconds(delivery.due_at) if waits else None,
        last_status=delivery.status,
        last_failure=delivery.failure,
    )


def unless_changed(precondition: Precondition) -> Check:
    """Return a check that includes the version, which tells of a new secret that is shown to
    nobody."""
    return lambda endpoint: precondition.check(to_wire(endpoint), endpoint.version)


def shown(request: AuthenticatedRequest, endpoint: EndpointRecord) -> Response[bytes]:
    return answer(request, to_wire(endpoint), unseen=(endpoint.version,))


def shown_once(made: EndpointOnce, *, status: int = 200) -> Response[bytes]:
    """Answer with the tag of the endpoint without its secret: what a later If-Match is compared
    with."""
    once = WebhookEndpointOnce(**_fields(made.endpoint), secret=made.secret)
    tag = tag_of(to_wire(made.endpoint), made.endpoint.version)
    return tagged(once, tag, status=status, headers=NO_STORE)


@post(
    WEBHOOKS,
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Create an endpoint; only this answer shows its secret",
    operation_class=describes(
        body=NewWebhookEndpoint, answer=WebhookEndpointOnce, status=201, idempotent=True
    ),
)
async def create(request: AuthenticatedRequest) -> Response[bytes]:
    wanted = decode_kept(_new_decoder, await plain_body(request))
    found, org_id = services(request), request.user.org_id
    async with tenant(found.db, org_id) as conn:
        made = await endpoints.create_endpoint(
            conn,
            found.webhooks.secrets,
            org_id=org_id,
            url=wanted.url,
            description=wanted.description,
            event_types=wanted.event_types,
            actor=actor_of(request),
            allow_loopback=found.webhooks.allow_loopback,
        )
    return shown_once(made, status=201)


@get(
    WEBHOOKS,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="List the endpoints",
    operation_class=describes(query=WebhooksQuery, answer=Listing[WebhookEndpoint]),
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query, org_id = parse_query(request.url.query, WebhooksQuery), request.user.org_id
    listed = endpoints.select_endpoints(org_id, archived=query.include_archived)
    async with tenant(services(request).db, org_id) as conn:
        rows = await conn.execute(keyset(listed, endpoints_table.c.id, query))
        found = [to_wire(each) for each in endpoints.to_endpoints(rows)]
    return answer(request, to_listing(found, query))


@get(
    WEBHOOK,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="One endpoint",
    operation_class=describes(answer=WebhookEndpoint, conditional=True),
)
async def retrieve(request: AuthenticatedRequest, endpoint_id: FromPath[str]) -> Response[bytes]:
    org_id = request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        found = await endpoints.get_endpoint(conn, org_id=org_id, endpoint_id=endpoint_id)
    return shown(request, found)


@patch(
    WEBHOOK,
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Change an endpoint",
    operation_class=describes(body=WebhookEndpointPatch, answer=WebhookEndpoint, conditional=True),
)
async def update(request: AuthenticatedRequest, endpoint_id: FromPath[str]) -> Response[bytes]:
    check = unless_changed(if_match(request))
    fields = given(decode_kept(_patch_decoder, await plain_body(request)))
    found, org_id = services(request), request.user.org_id
    async with tenant(found.db, org_id) as conn:
        changed = await endpoints.update_endpoint(
            conn,
            org_id=org_id,
            endpoint_id=endpoint_id,
            fields=fields,
            actor=actor_of(request),
            check=check,
            allow_loopback=found.webhooks.allow_loopback,
        )
    return shown(request, changed)


@post(
    WEBHOOK + "/rotate-secret",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Give an endpoint a new secret; for `grace_s` both sign",
    operation_class=describes(
        body=SecretRotation, answer=WebhookEndpointOnce, idempotent=True, conditional=True
    ),
)
async def rotate(request: AuthenticatedRequest, endpoint_id: FromPath[str]) -> Response[bytes]:
    wanted = decode_kept(_rotation_decoder, await plain_body(request) or b"{}")
    found, org_id = services(request), request.user.org_id
    check = unless_changed(if_match(request))
    async with tenant(found.db, org_id) as conn:
        made = await endpoints.rotate_secret(
            conn,
            found.webhooks.secrets,
            org_id=org_id,
            endpoint_id=endpoint_id,
            grace_s=wanted.grace_s,
            actor=actor_of(request),
            check=check,
        )
    return shown_once(made)


@post(
    WEBHOOK + "/archive",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Archive an endpoint: it is sent nothing more, not even what waits",
    operation_class=describes(answer=WebhookEndpoint, idempotent=True, conditional=True),
)
async def archive(request: AuthenticatedRequest, endpoint_id: FromPath[str]) -> Response[bytes]:
    check, org_id = unless_changed(if_match(request)), request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        archived = await endpoints.archive_endpoint(
            conn, org_id=org_id, endpoint_id=endpoint_id, actor=actor_of(request), check=check
        )
    return shown(request, archived)


@post(
    WEBHOOK + "/ping",
    opt=needs(SCOPE),
    tags=TAGS,
    summary="Send an endpoint an event that says nothing",
    operation_class=describes(answer=WebhookDelivery, status=201, idempotent=True),
)
async def ping(request: AuthenticatedRequest, endpoint_id: FromPath[str]) -> Response[bytes]:
    org_id = request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        made = await deliveries.ping_endpoint(
            conn,
            org_id=org_id,
            endpoint_id=endpoint_id,
            now=datetime.now(tz=UTC),
            actor=actor_of(request),
        )
    return answer(request, to_delivery(made), status=201)


@get(
    DELIVERIES,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="List what was sent to an endpoint, or waits to be, of the last 30 days",
    operation_class=describes(query=DeliveriesQuery, answer=Listing[WebhookDelivery]),
)
async def list_deliveries(
    request: AuthenticatedRequest, endpoint_id: FromPath[str]
) -> Response[bytes]:
    query, org_id = parse_query(request.url.query, DeliveriesQuery), request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        await endpoints.get_endpoint(conn, org_id=org_id, endpoint_id=endpoint_id)
        listed = deliveries.select_deliveries(org_id, endpoint_id, state=query.state)
        rows = await conn.execute(keyset(listed, deliveries_table.c.id, query))
        found = [to_delivery(each) for each in deliveries.to_deliveries(rows)]
    return answer(request, to_listing(found, query))


@get(
    DELIVERY,
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="One delivery",
    operation_class=describes(answer=WebhookDelivery),
)
async def retrieve_delivery(
    request: AuthenticatedRequest, endpoint_id: FromPath[str], delivery_id: FromPath[str]
) -> Response[bytes]:
    org_id = request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        found = await deliveries.get_delivery(
            conn, org_id=org_id, endpoint_id=endpoint_id, delivery_id=delivery_id
        )
    return answer(request, to_delivery(found))


@post(
    DELIVERY + "/redeliver",
    opt=needs(SCOPE),
    status_code=200,
    tags=TAGS,
    summary="Send it once more, and try for another day; `webhook-id` stays the same",
    operation_class=describes(answer=WebhookDelivery, idempotent=True),
)
async def redeliver(
    request: AuthenticatedRequest, endpoint_id: FromPath[str], delivery_id: FromPath[str]
) -> Response[bytes]:
    org_id = request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        found = await deliveries.redeliver(
            conn,
            org_id=org_id,
            endpoint_id=endpoint_id,
            delivery_id=delivery_id,
            actor=actor_of(request),
        )
    return answer(request, to_delivery(found))


routes = [
    create,
    list_,
    retrieve,
    update,
    rotate,
    archive,
    ping,
    list_deliveries,
    retrieve_delivery,
    redeliver,
]
