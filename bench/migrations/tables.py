"""The tables that migrations since the last release change, and SQL that makes rows of them."""

from __future__ import annotations

import msgspec

PARENTS = """
    INSERT INTO orgs (id, name) VALUES ('org_bench', 'bench');
    INSERT INTO projects (id, org_id, name) VALUES ('proj_bench', 'org_bench', 'bench');
    INSERT INTO plans (name) VALUES ('bench')
"""


class Table(msgspec.Struct, frozen=True):
    """A table, and SQL that makes its row number `n`."""

    name: str
    row: str
    """Column = value, one a line."""
    touch: str
    """The writer makes this change in a row."""
    key: tuple[str, ...] = ("id",)
    """The columns by which an index finds a row."""
    since: str = ""
    """The migration that made it, if that is younger than the last release."""
    is_partitioned: bool = False

    @property
    def values(self) -> dict[str, str]:
        lines = (line.strip().split(" = ", 1) for line in self.row.strip().splitlines())
        return dict(lines)

    @property
    def insert(self) -> str:
        """Return SQL that adds the rows of each `n` of the FROM that follows it."""
        names, values = self.values.keys(), self.values.values()
        return f"INSERT INTO {self.name} ({', '.join(names)}) SELECT {', '.join(values)}"

    @property
    def where(self) -> str:
        """Return SQL that finds the row whose number is the first argument."""
        made = "FROM (SELECT $1::bigint AS n) made"
        return " AND ".join(f"{name} = (SELECT {self.values[name]} {made})" for name in self.key)


TABLES = {
    table.name: table
    for table in (
        Table(
            "api_keys",
            """
            id = 'key_' || lpad(n::text, 10, '0')
            org_id = 'org_bench'
            project_id = 'proj_bench'
            name = 'made'
            key_hash = lpad(n::text, 10, '0')
            pepper_id = 'p'
            prefix = 'tg'
            last_four = '0000'
            scopes = '{inference}'::text[]
            """,
            "last_used_at = now()",
        ),
        Table(
            "users",
            """
            id = 'user_' || lpad(n::text, 10, '0')
            org_id = 'org_bench'
            email = lpad(n::text, 10, '0') || '@example.com'
            name = 'made'
            role = 'developer'
            """,
            "name = 'changed'",
        ),
        Table(
            "webhook_endpoints",
            """
            id = 'whe_' || lpad(n::text, 10, '0')
            org_id = 'org_bench'
            url = 'https://example.com/'
            event_types = '{all}'::text[]
            secret_sealed = ''
            secret_id = 's'
            """,
            "version = version + 1",
        ),
        Table(
            "request_log",
            """
            id = (lpad(to_hex(n), 12, '0') || '70008000000000000000')::uuid
            org = 'org_bench'
            at = date_trunc('day', now(), 'UTC') + (n % 86400000) * interval '1 millisecond'
            project = 'proj_bench'
            key = 'key_1'
            model = 'penny'
            lane = 'interactive'
            route = '/v1/chat/completions'
            status = 200
            duration_us = 1000
            uncached_tokens = 1
            cached_tokens = 1
            written_tokens = 1
            output_tokens = 1
            reasoning_tokens = 1
            cost_pico = 1
            trace = (lpad(to_hex(n), 12, '0') || '70008000000000000000')::uuid
            landed_at = now()
            """,
            "status = 201",
            key=("org", "at"),
            since="0065",
            is_partitioned=True,
        ),
    )
}
