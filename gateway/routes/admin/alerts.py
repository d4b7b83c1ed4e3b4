"""/v1/admin/alerts: thresholds of budgets and rate limits that were reached."""

from __future__ import annotations

from functools import partial

from billing.alerts.alerts import Alert, select_alerts
from billing.tables import read_struct
from gateway.routes.shared.resource import AdminResource
from gateway.wire.admin.webhook_events import AlertView, to_view
from gateway.wire.shared.page_query import PageQuery

alerts = AdminResource[Alert](path="/v1/admin/alerts", tag="Alerts", view=AlertView, show=to_view)

list_ = alerts.list_all(
    "List the thresholds that were reached, each once in its period",
    PageQuery,
    select=lambda org_id, _query: select_alerts(org_id),
    row=partial(read_struct, Alert),
)

routes = [list_]
