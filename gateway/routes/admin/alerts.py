"""/v1/admin/alerts: thresholds of budgets and rate limits that were reached; the e-mails that told
of events: /v1/admin/mail-deliveries; and what upstreams claimed and nobody was billed for:
/v1/admin/disputed-usage."""

from __future__ import annotations

from functools import partial

from billing.alerts.alerts import Alert, select_alerts
from billing.alerts.disputed_usage import DisputeRecord, select_disputed
from billing.tables import disputed_usage, read_struct
from gateway.routes.shared.resource import AdminResource
from gateway.webhooks.mail_channel import MailRecord, select_mails
from gateway.webhooks.queue import PENDING
from gateway.wire.admin.webhook_events import (
    AlertView,
    DisputedUsageView,
    to_disputed_view,
    to_view,
)
from gateway.wire.admin.webhooks import DeliveryState, MailDelivery
from gateway.wire.shared.page_query import PageQuery
from gateway.wire.shared.resource import to_seconds, view_of

alerts = AdminResource[Alert](path="/v1/admin/alerts", tag="Alerts", view=AlertView, show=to_view)

list_ = alerts.list_all(
    "List the thresholds that were reached, each once in its period",
    PageQuery,
    select=lambda org_id, _query: select_alerts(org_id),
    row=partial(read_struct, Alert),
)

disputed = AdminResource[DisputeRecord](
    path="/v1/admin/disputed-usage", tag="Alerts", view=DisputedUsageView, show=to_disputed_view
)

list_disputed = disputed.list_all(
    "List what upstreams claimed of requests beyond what these can have used; nobody is billed it",
    PageQuery,
    select=lambda org_id, _query: select_disputed(org_id),
    row=partial(read_struct, DisputeRecord),
    key=disputed_usage.c.event_id,
    name="list_disputed",
)


class MailsQuery(PageQuery):
    state: DeliveryState | None = None


def show_mail(mail: MailRecord) -> MailDelivery:
    waits = mail.state == PENDING
    return view_of(
        MailDelivery,
        mail,
        next_attempt_at=to_seconds(mail.due_at) if waits else None,
        last_status=mail.status,
        last_failure=mail.failure,
    )


mails = AdminResource[MailRecord](
    path="/v1/admin/mail-deliveries", tag="Alerts", view=MailDelivery, show=show_mail
)

list_mails = mails.list_all(
    "List the e-mails that told people of events, or wait to, of the last 30 days",
    MailsQuery,
    select=lambda org_id, query: select_mails(org_id, state=query.state),
    row=MailRecord,
    name="list_mail_deliveries",
)

routes = [list_, list_disputed, list_mails]
