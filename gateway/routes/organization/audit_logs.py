"""GET /v1/organization/audit_logs: who changed what in the org of the credential that asks."""

from __future__ import annotations

from litestar import Response

from gateway.audit.errors import UnknownAuditEntry
from gateway.db import tenant
from gateway.request_errors import BadField
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.conditional import answer
from gateway.routes.shared.operations import RouteGroup
from gateway.tenancy.audit_pages import list_entries
from gateway.wire.organization.audit import AuditLogsQuery, EventList, to_list
from gateway.wire.organization.usage import parse_query

audit = RouteGroup(tag="Audit", opt=needs("admin:audit"))


@audit.get(
    "/v1/organization/audit_logs",
    "Who changed what, the newest first",
    query=AuditLogsQuery,
    answer=EventList,
)
async def list_audit_logs(request: AuthenticatedRequest) -> Response[bytes]:
    query = parse_query(request.url.query, AuditLogsQuery)
    org_id = request.user.org_id
    try:
        async with tenant(services(request).db, org_id) as conn:
            events, has_more = await list_entries(conn, org_id, query)
    except UnknownAuditEntry as error:
        message = f"Invalid value for '{error.param}': there is no such audit log."
        raise BadField(message, param=error.param) from error
    return answer(request, to_list(events, has_more=has_more))


routes = [list_audit_logs]
