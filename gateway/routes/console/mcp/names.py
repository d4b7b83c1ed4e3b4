"""Names for the ids of callers on the pages of MCP."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.console.hidden import visible
from gateway.mcp.admin.call_log import names_of

Named = Callable[[str | None], str | None]


async def find_names(conn: AsyncConnection, org_id: str, ids: Iterable[str | None]) -> Named:
    """Return a function that names a project, a key, a client or a person; what is gone by its
    id."""
    names = await names_of(conn, org_id, ids)
    return lambda id: None if id is None else visible(names.get(id, id))
