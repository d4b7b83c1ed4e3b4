"""GET /v1/admin/journal: what was asked of an org and paid by it, in double entry, for beancount or
hledger.

Who may read the administration of an org reads its journal; an operator names another org by
`org_id`.
"""

from __future__ import annotations

from typing import Any

from litestar import Response, get

from gateway.permissions import SCOPE_ADMIN_READ
from gateway.routes.admin.billing.invoice_exports import BEANCOUNT, HLEDGER, Ledgers, journal
from gateway.routes.admin.billing.invoices import TAGS
from gateway.routes.shared.access import AuthenticatedRequest, needs, services
from gateway.routes.shared.operations import describes
from gateway.routes.shared.resource import org_of
from gateway.wire.organization.usage import parse_query
from gateway.wire.shared.page_query import OrgQuery


class JournalQuery(OrgQuery):
    format: Ledgers = "beancount"


@get(
    "/v1/admin/journal",
    opt=needs(SCOPE_ADMIN_READ),
    tags=TAGS,
    summary="The journal of an organization: its credits, final invoices, credit notes, payments",
    operation_class=describes(query=JournalQuery, said={200: {BEANCOUNT: str, HLEDGER: str}}),
)
async def retrieve(request: AuthenticatedRequest) -> Response[Any]:
    query = parse_query(request.url.query, JournalQuery)
    org_id, _ = org_of(request.user, query.org_id)
    return await journal(services(request).system_db, org_id=org_id, format=query.format)


routes = [retrieve]
