"""Shows /console/webhooks: where events of the organization are sent and what became of each; sends
one again, and makes, changes and archives endpoints; and /console/webhooks/mails: what people were
sent of them by e-mail."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, get_args

from litestar import Response

from gateway.console.hidden import visible
from gateway.console.tables import Table, TableColumn
from gateway.mcp.admin.call_log import names_of
from gateway.routes.console.frame.page import ConsolePage
from gateway.routes.console.frame.request import ConsoleRequest
from gateway.tenancy.errors import InvalidField
from gateway.tenancy.named_urls import check_url
from gateway.tenancy.pages import read_page
from gateway.webhooks import deliveries as delivery_verbs
from gateway.webhooks import endpoints as verbs
from gateway.webhooks.deliveries import DeliveryRecord, select_deliveries
from gateway.webhooks.endpoints import EndpointOnce, EndpointRecord
from gateway.webhooks.mail_channel import MailRecord, select_mails
from gateway.webhooks.queue import PENDING
from gateway.webhooks.tables import deliveries
from gateway.webhooks.tables import mails as mail_deliveries
from gateway.wire.admin.webhook_events import EventType
from gateway.wire.admin.webhooks import DeliveryState

CHANGE = "admin:billing"
EVENTS = sorted(get_args(EventType))
STATES: tuple[str, ...] = get_args(DeliveryState)
SHOWN = {
    "delivered": ("delivered", "ok"),
    "pending": ("waits", "wait"),
    "dead": ("given up", "err"),
}
"""The words of states, and their tones."""
GRACE_S = 86_400
"""A new secret and the one before it both sign for so long."""

page = ConsolePage(name="webhooks", title="Webhooks", letter="w")
mails = ConsolePage(name="webhooks/mails", title="E-mails", below="webhooks")


def state_of(endpoint: EndpointRecord) -> tuple[str, str]:
    if endpoint.archived_at is not None:
        return "archived", "plain"
    return ("off", "wait") if endpoint.disabled_at is not None else ("on", "ok")


@page.get()
async def show(request: ConsoleRequest, made: EndpointOnce | None = None) -> Response[bytes]:
    listed = verbs.select_endpoints(request.org_id, archived=request.value("archived") == "yes")
    async with request.transaction() as conn:
        found = [EndpointRecord(**row._mapping) for row in await conn.execute(listed)]
        counts = await delivery_verbs.count_deliveries(conn, org_id=request.org_id)
    found.sort(key=lambda endpoint: endpoint.id, reverse=True)

    def number(state: str) -> Any:
        return lambda endpoint: counts.get((endpoint.id, state), 0)

    table = Table(
        "Endpoints",
        found,
        TableColumn("Sent to", "url", link=lambda each: f"{page.path}/{each.id}"),
        TableColumn("State", state_of, kind="tag"),
        TableColumn("Events", lambda each: ", ".join(each.event_types)),
        TableColumn("Delivered", number("delivered"), kind="count", hint="In the last 30 days."),
        TableColumn("Waiting", number(PENDING), kind="count"),
        TableColumn("Given up", number("dead"), kind="count", hint="Tried for a day, in vain."),
        TableColumn("Made", "created_at", kind="time"),
    )
    dead = sum(count for (_, state), count in counts.items() if state == "dead")
    return request.render("webhooks", table=table, made=made, events=EVENTS, dead=dead)


def chosen_events(request: ConsoleRequest) -> list[str]:
    """Raises: InvalidField."""
    found = [each for each in EVENTS if each in request.form]
    if not found:
        raise InvalidField("event_types", "choose one at least")
    return found


@page.post("/create", needs=CHANGE, again=show)
async def create(request: ConsoleRequest) -> Response[bytes]:
    service, url = request.services.webhooks, request.form.get("url", "").strip()
    await check_url(request.services.federation.named_urls, "url", url)
    async with request.transaction() as conn:
        made = await verbs.create_endpoint(
            conn,
            service.secrets,
            org_id=request.org_id,
            actor=request.actor,
            allow_loopback=service.allow_loopback,
            url=url,
            description=request.form.get("description", "").strip() or None,
            event_types=chosen_events(request),
        )
    request.form = {}
    return await show(request, made)


@page.get("/{endpoint_id:str}")
async def show_one(request: ConsoleRequest, made: EndpointOnce | None = None) -> Response[bytes]:
    endpoint_id, state = request.ids["endpoint_id"], request.value("state", STATES)
    async with request.transaction() as conn:
        endpoint = await verbs.get_endpoint(conn, org_id=request.org_id, endpoint_id=endpoint_id)
        listed = select_deliveries(request.org_id, endpoint_id, state=state or None)
        rows, more = await read_page(conn, listed, deliveries.c.id, request.cursor())
    found = [DeliveryRecord(**row._mapping) for row in rows]
    table = Table(
        "Deliveries",
        found,
        TableColumn("Event", "event_type"),
        TableColumn("State", lambda each: SHOWN[each.state], "tag", detail=next_try),
        TableColumn("Answer", answer_of),
        TableColumn("Attempts", "attempts", kind="count"),
        TableColumn("Happened", "created_at", kind="time"),
        TableColumn("webhook-id", "event_id", kind="id"),
    )
    return request.render(
        "webhook",
        table=table,
        more=found[-1].id if more else None,
        endpoint=endpoint,
        state=state_of(endpoint),
        states=[(each, SHOWN[each][0]) for each in STATES],
        made=made,
        is_open=endpoint.archived_at is None,
        is_ours=endpoint.settings_name is None and endpoint.archived_at is None,
    )


def next_try(delivery: DeliveryRecord | MailRecord) -> str | None:
    return f"again at {delivery.due_at:%H:%M} UTC" if delivery.state == PENDING else None


def answer_of(delivery: DeliveryRecord | MailRecord) -> str | None:
    if delivery.status is None:
        return delivery.failure
    return f"{delivery.status} {delivery.failure or ''}".strip()


ONE = "/{endpoint_id:str}"


def where_of(request: ConsoleRequest) -> dict[str, Any]:
    return {"org_id": request.org_id, "endpoint_id": request.ids["endpoint_id"]}


def here(request: ConsoleRequest) -> str:
    return f"{page.path}/{request.ids['endpoint_id']}"


@page.post(f"{ONE}/ping", needs=CHANGE, again=show_one)
async def ping(request: ConsoleRequest) -> Response[bytes]:
    async with request.transaction() as conn:
        now = datetime.now(tz=UTC)
        await delivery_verbs.ping_endpoint(conn, **where_of(request), now=now, actor=request.actor)
    return request.done("A test event is on its way.", to=here(request))


@page.post(f"{ONE}/switch", needs=CHANGE, again=show_one)
async def switch(request: ConsoleRequest) -> Response[bytes]:
    is_on = request.form.get("enabled") == "yes"
    async with request.transaction() as conn:
        await verbs.update_endpoint(
            conn,
            **where_of(request),
            actor=request.actor,
            fields={"enabled": is_on},
            allow_loopback=request.services.webhooks.allow_loopback,
        )
    said = "Events are sent again." if is_on else "Nothing is sent until it is switched on."
    return request.done(said, to=here(request))


@page.post(f"{ONE}/rotate-secret", needs=CHANGE, again=show_one)
async def rotate(request: ConsoleRequest) -> Response[bytes]:
    async with request.transaction() as conn:
        made = await verbs.rotate_secret(
            conn,
            request.services.webhooks.secrets,
            **where_of(request),
            actor=request.actor,
            grace_s=GRACE_S,
        )
    return await show_one(request, made)


@page.post(f"{ONE}/archive", needs=CHANGE, again=show_one)
async def archive(request: ConsoleRequest) -> Response[bytes]:
    async with request.transaction() as conn:
        await verbs.archive_endpoint(conn, **where_of(request), actor=request.actor)
    return request.done("The endpoint is archived: it is sent nothing more.")


@page.post(f"{ONE}/deliveries/{{delivery_id:str}}/redeliver", needs=CHANGE, again=show_one)
async def redeliver(request: ConsoleRequest) -> Response[bytes]:
    async with request.transaction() as conn:
        sent = await delivery_verbs.redeliver(
            conn,
            **where_of(request),
            delivery_id=request.ids["delivery_id"],
            actor=request.actor,
        )
    return request.done(
        f"{sent.event_type} is sent once more, under the same webhook-id.", to=here(request)
    )


@mails.get()
async def show_mails(request: ConsoleRequest) -> Response[bytes]:
    listed = select_mails(request.org_id, state=request.value("state", STATES) or None)
    async with request.transaction() as conn:
        rows, more = await read_page(conn, listed, mail_deliveries.c.id, request.cursor())
        people = await names_of(conn, request.org_id, [row.user_id for row in rows])
    found = [MailRecord(**row._mapping) for row in rows]
    table = Table(
        "E-mails",
        found,
        TableColumn("Event", "event_type"),
        TableColumn("To", lambda each: visible(people.get(each.user_id, each.user_id)),
                    link=lambda each: f"/console/people/{each.user_id}"),
        TableColumn("State", lambda each: SHOWN[each.state], "tag", detail=next_try),
        TableColumn("Answer", answer_of),
        TableColumn("Attempts", "attempts", kind="count"),
        TableColumn("Happened", "created_at", kind="time"),
        TableColumn("Id", "id", kind="id"),
    )  # fmt: skip
    return request.render(
        "mails",
        table=table,
        more=found[-1].id if more else None,
        states=[(each, SHOWN[each][0]) for each in STATES],
    )


routes = [*page.routes, *mails.routes]
