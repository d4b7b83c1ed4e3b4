"""Warns of rules for tool calls that name nothing which exists: their author may have yet to make
it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.auth.tables import oauth_clients
from gateway.tenancy.tables import api_keys, projects
from mcp_bridge.names import SEPARATOR
from mcp_bridge.trust.policy import ToolRule

MAX_WARNINGS = 100
WILD = re.compile(r"[*?\[]")


async def warnings_of(
    conn: AsyncConnection, *, org_id: str, rules: Sequence[ToolRule], servers: Collection[str]
) -> list[str]:
    """Return at most MAX_WARNINGS. `servers`: the names of those that are configured."""
    found: list[str] = []
    known = await known_ids(conn, org_id, {rule.of for rule in rules if rule.of})
    for rule in rules:
        lost = [glob for glob in rule.tools if not names_a_server(glob, servers)]
        found += [f"rule {rule.id!r}: no server is configured that {glob!r} names" for glob in lost]
        # A client whose id is a URL is known by that alone.
        if rule.of and (rule.level, rule.of) not in known and "://" not in rule.of:
            what = "project" if rule.level == "project" else "key or OAuth client"
            found.append(f"rule {rule.id!r}: there is no {what} {rule.of!r}")
    return found[:MAX_WARNINGS]


def names_a_server(glob: str, servers: Collection[str]) -> bool:
    head, separator, _ = glob.partition(SEPARATOR)
    if separator:
        return any(fnmatchcase(server, head) for server in servers)
    wild = WILD.search(glob)
    begins = "" if wild is None else glob[: wild.start()]
    return wild is not None and any(f"{each}{SEPARATOR}".startswith(begins) for each in servers)


async def known_ids(
    conn: AsyncConnection, org_id: str, wanted: Collection[str]
) -> set[tuple[str, str]]:
    """Return the ids that exist, by level."""
    if not wanted:
        return set()
    kept = sa.union_all(
        *(
            sa.select(sa.literal(level), table.c.id).where(
                table.c.id.in_(wanted), sa.or_(table.c.org_id == org_id, table.c.org_id.is_(None))
            )
            for level, table in (("project", projects), ("key", api_keys), ("key", oauth_clients))
        )
    )
    return {(level, id_) for level, id_ in await conn.execute(kept)}
