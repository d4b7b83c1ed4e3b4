"""/v1/admin/alerts: thresholds of budgets and rate limits that were reached; and what upstreams
claimed and nobody was billed for: /v1/admin/disputed-usage."""

from __future__ import annotations

from functools import partial

from billing.alerts.alerts import Alert, select_alerts
from billing.alerts.disputed_usage import DisputeRecord, select_disputed
from billing.tables import disputed_usage, read_struct
from gateway.routes.shared.resource import AdminResource
from gateway.wire.admin.webhook_events import (
    AlertView,
    DisputedUsageView,
    to_disputed_view,
    to_view,
)
from gateway.wire.shared.page_query import PageQuery

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

routes = [list_, list_disputed]
