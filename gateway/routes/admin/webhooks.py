"""/v1/admin/webhooks: where an organization's events are sent, and what became of each.

A secret stands in the answer to the request that drew it, and in no other.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from litestar import Response
from msgspec.structs import asdict

from gateway.routes.shared.access import needs
from gateway.routes.shared.resource import AdminRequest, AdminResource, read_rows
from gateway.tenancy.named_urls import check_url
from gateway.webhooks import deliveries as delivery_verbs
from gateway.webhooks import endpoints as verbs
from gateway.webhooks.deliveries import DeliveryRecord
from gateway.webhooks.endpoints import EndpointOnce, EndpointRecord
from gateway.webhooks.queue import PENDING
from gateway.wire.admin.oauth_clients import SecretRotation
from gateway.wire.admin.webhooks import (
    DeliveryState,
    NewWebhookEndpoint,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookEndpointOnce,
    WebhookEndpointPatch,
)
from gateway.wire.shared.page_query import ArchivedPageQuery, PageQuery
from gateway.wire.shared.resource import to_seconds, view_of


class DeliveriesQuery(PageQuery):
    state: DeliveryState | None = None


def to_wire(endpoint: EndpointRecord) -> WebhookEndpoint:
    return view_of(
        WebhookEndpoint,
        endpoint,
        enabled=endpoint.disabled_at is None,
        in_settings=endpoint.settings_name is not None,
    )


def to_delivery(delivery: DeliveryRecord) -> WebhookDelivery:
    waits = delivery.state == PENDING
    return view_of(
        WebhookDelivery,
        delivery,
        next_attempt_at=to_seconds(delivery.due_at) if waits else None,
        last_status=delivery.status,
        last_failure=delivery.failure,
    )


webhooks = AdminResource[EndpointRecord](
    path="/v1/admin/webhooks",
    id_name="endpoint_id",
    tag="Webhooks",
    change=needs("admin:billing"),
    view=WebhookEndpoint,
    show=to_wire,
    # A new secret, which nobody is shown, is another version.
    unseen=lambda endpoint: (endpoint.version,),
    checks_ids=False,
)
deliveries = AdminResource[DeliveryRecord](
    path=webhooks.one + "/deliveries",
    id_name="delivery_id",
    tag="Webhooks",
    change=needs("admin:billing"),
    view=WebhookDelivery,
    show=to_delivery,
    checks_ids=False,
)


def respond_once(made: EndpointOnce, *, status: int = 200) -> Response[bytes]:
    once = view_of(WebhookEndpointOnce, to_wire(made.endpoint), secret=made.secret)
    return webhooks.respond_once(once, made.endpoint, status=status)


list_ = webhooks.list_all(
    "List the endpoints",
    ArchivedPageQuery,
    select=lambda org_id, query: verbs.select_endpoints(org_id, archived=query.include_archived),
    row=EndpointRecord,
)

retrieve = webhooks.retrieve("One endpoint", verbs.get_endpoint)


@webhooks.create(
    "Create an endpoint; only this answer shows its secret",
    NewWebhookEndpoint,
    answer=WebhookEndpointOnce,
)
async def create(request: AdminRequest, wanted: NewWebhookEndpoint) -> Response[bytes]:
    service = request.services.webhooks
    await check_url(request.services.federation.named_urls, "url", wanted.url)
    async with request.transaction() as conn:
        made = await verbs.create_endpoint(
            conn,
            service.secrets,
            org_id=request.org_id,
            actor=request.actor,
            allow_loopback=service.allow_loopback,
            **asdict(wanted),
        )
    return respond_once(made, status=201)


@webhooks.update("Change an endpoint", WebhookEndpointPatch)
async def update(request: AdminRequest, values: dict[str, Any]) -> EndpointRecord:
    loopback = request.services.webhooks.allow_loopback
    if "url" in values:
        await check_url(request.services.federation.named_urls, "url", values["url"])
    async with request.transaction() as conn:
        return await verbs.update_endpoint(
            conn,
            **request.where,
            actor=request.actor,
            check=request.check,
            fields=values,
            allow_loopback=loopback,
        )


@webhooks.act(
    "/rotate-secret",
    "Give an endpoint a new secret; for `grace_s` both sign",
    body=SecretRotation,
    body_required=False,
    answer=WebhookEndpointOnce,
)
async def rotate(request: AdminRequest, wanted: SecretRotation) -> Response[bytes]:
    async with request.transaction() as conn:
        made = await verbs.rotate_secret(
            conn,
            request.services.webhooks.secrets,
            **request.where,
            actor=request.actor,
            check=request.check,
            grace_s=wanted.grace_s,
        )
    return respond_once(made)


@webhooks.archive("Archive an endpoint: it is sent nothing more, not even what waits")
async def archive(request: AdminRequest) -> EndpointRecord:
    async with request.transaction() as conn:
        return await verbs.archive_endpoint(
            conn, **request.where, actor=request.actor, check=request.check
        )


@webhooks.act(
    "/ping",
    "Send an endpoint an event that says nothing",
    answer=WebhookDelivery,
    status=201,
    conditional=False,
)
async def ping(request: AdminRequest) -> WebhookDelivery:
    async with request.transaction() as conn:
        now = datetime.now(tz=UTC)
        made = await delivery_verbs.ping_endpoint(
            conn, **request.where, now=now, actor=request.actor
        )
    return to_delivery(made)


@deliveries.page(
    "List what was sent to an endpoint, or waits to be, of the last 30 days", DeliveriesQuery
)
async def list_deliveries(
    request: AdminRequest, query: DeliveriesQuery
) -> tuple[list[DeliveryRecord], bool]:
    async with request.transaction() as conn:
        await verbs.get_endpoint(conn, **request.where)
        listed = delivery_verbs.select_deliveries(**request.where, state=query.state)
        rows, more = await read_rows(conn, listed, query)
    return [DeliveryRecord(**row._mapping) for row in rows], more


retrieve_delivery = deliveries.retrieve(
    "One delivery", delivery_verbs.get_delivery, name="retrieve_delivery"
)


@deliveries.act(
    "/redeliver",
    "Send it once more, and try for another day; `webhook-id` stays the same",
    conditional=False,
)
async def redeliver(request: AdminRequest) -> DeliveryRecord:
    async with request.transaction() as conn:
        return await delivery_verbs.redeliver(conn, **request.where, actor=request.actor)


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
