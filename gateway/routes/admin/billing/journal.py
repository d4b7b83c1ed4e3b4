"""GET /v1/admin/journal: what was asked of an org and paid by it, in double entry, for beancount or
hledger.

Who may read the administration of an org reads its journal; an operator names another org by
`org_id`.
"""

from __future__ import annotations

from typing import Any

from litestar import Response

from gateway.routes.admin.billing.invoice_exports import BEANCOUNT, HLEDGER, Ledgers, journal
from gateway.routes.admin.billing.invoices import invoices
from gateway.routes.shared.resource import AdminRequest
from gateway.wire.shared.page_query import OrgQuery


class JournalQuery(OrgQuery):
    format: Ledgers = "beancount"


@invoices.get(
    "The journal of an organization: its credits, final invoices, credit notes, payments",
    path="/v1/admin/journal",
    query=JournalQuery,
    said={200: {BEANCOUNT: str, HLEDGER: str}},
)
async def retrieve(request: AdminRequest, query: JournalQuery) -> Response[Any]:
    return await journal(request.system_db, org_id=request.org_id, format=query.format)


routes = [retrieve]
