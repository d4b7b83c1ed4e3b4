"""/v1/admin/alerts: thresholds of budgets and rate limits that were reached."""

from __future__ import annotations

from litestar import Response, get

from billing.alerts.alerts import select_alerts, to_alerts
from billing.tables import alerts as table
from gateway.db import tenant
from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.operations import describes
from gateway.routes.shared.pages import Listing, PageQuery, keyset, to_listing
from gateway.wire.admin.webhook_events import AlertView, to_view
from gateway.wire.organization.usage import parse_query


@get(
    "/v1/admin/alerts",
    opt=needs(SCOPE_ADMIN_READ),
    tags=["Alerts"],
    summary="List the thresholds that were reached, each once in its period",
    operation_class=describes(query=PageQuery, answer=Listing[AlertView]),
)
async def list_(request: AuthenticatedRequest) -> Response[bytes]:
    query, org_id = parse_query(request.url.query, PageQuery), request.user.org_id
    async with tenant(services(request).db, org_id) as conn:
        rows = await conn.execute(keyset(select_alerts(org_id), table.c.id, query))
        found = [to_view(each) for each in to_alerts(rows)]
    return answer(request, to_listing(found, query))


routes = [list_]
