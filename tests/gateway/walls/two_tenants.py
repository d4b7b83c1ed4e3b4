"""Two tenants with a row in every table there is, whatever migrations add: made from the catalog,
not by hand. Nothing here knows a table by name but `orgs`.

Checks and triggers are dropped from the test's own database first: what these rows try is who sees
them, not what they say. References between them hold.
"""

from __future__ import annotations

import re

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

ALICE, MALLORY = "org_alice", "org_mallory"
"""The victim and the one who tries."""
TENANT_POLICY = re.compile(
    r"\((\w+) = NULLIF\(current_setting\('tollgate\.org'::text, true\), ''::text\)\)"
)
LITERALS = {
    "text": "'{label}'",
    "boolean": "false",
    "smallint": "{number}",
    "integer": "{number}",
    "bigint": "{number}",
    "numeric(38,0)": "{number}",
    "numeric": "{number}",
    "double precision": "{number}",
    "timestamp with time zone": "now() + interval '1 hour'",
    "jsonb": "'{{}}'",
    "bytea": "convert_to('{label}', 'UTF8')",
    "uuid": "md5('{label}')::uuid",
    "text[]": "ARRAY['{label}']",
    "inet": "'127.0.0.1'",
    "cidr[]": "'{{}}'",
    "int8range": "int8range({number}, {number}, '[]')",
    "tstzrange": "tstzrange(now(), NULL)",
}
"""A value of each type; a new type of column stands here."""
APPROVAL = """'{{"id": "{label}", "nonce": "n", "requested_at_s": 1, "expires_at_s": 2,
    "state": "used", "call": {{"org_id": "o", "caller": "o\\np\\ns\\nc", "server": "s", "pin": "p",
    "arguments_digest": "d", "policy_version": "v"}}}}'"""
LITERALS_OF = {
    ("mcp_approvals", "arguments"): "NULL",
    ("mcp_approvals", "body"): APPROVAL,
    ("invoice_lines", "kind"): "'adjustment'",
    ("invoices", "currency"): "'USD'",
    ("invoices", "state"): "'draft'",
    ("invites", "projects"): "'[]'",
    ("invites", "role"): "'owner'",
    ("batches", "status"): "'cancelled'",
    ("files", "purpose"): "'batch'",
    ("issuers", "issuer"): "'https://id.example/{label}'",
    ("mcp_approvals", "state"): "'used'",
    ("mcp_rules", "body"): "'[]'",
    ("oauth_clients", "token_endpoint_auth_method"): "'client_secret_basic'",
    ("project_members", "role"): "'owner'",
    ("reratings", "lines"): "'[]'",
    ("service_accounts", "project_role"): "'owner'",
    ("service_accounts", "role"): "'owner'",
    ("upstream_credentials", "kind"): "'static'",
    ("users", "role"): "'owner'",
}
"""By table and column, where a verb needs a certain one."""


class Column(msgspec.Struct, frozen=True):
    table: str
    name: str
    type: str
    required: bool


class Relation(msgspec.Struct, frozen=True):
    name: str
    kind: str
    """r: a table; p: one with partitions; v: a view."""
    row_security: bool


RELATIONS = sa.text("""
    SELECT relname AS name, relkind::text AS kind, relrowsecurity AS row_security FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'f')
        AND NOT relispartition
    ORDER BY relname
""")
PARTITIONS = sa.text("""
    SELECT relname AS name, relkind::text AS kind, relrowsecurity AS row_security FROM pg_class
    WHERE relnamespace = 'public'::regnamespace AND relispartition AND relkind = 'r'
""")
COLUMNS = sa.text("""
    SELECT relname AS table, attname AS name, format_type(atttypid, atttypmod) AS type,
        attnotnull AND NOT atthasdef AS required
    FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid
    WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND attnum > 0
        AND NOT relispartition
        AND NOT attisdropped AND attidentity = '' AND attgenerated = ''
    ORDER BY relname, attnum
""")
REFERENCES = sa.text("""
    SELECT t.relname AS table, a.attname AS column, rt.relname AS of_table, ra.attname AS of_column
    FROM pg_constraint c
    JOIN pg_class t ON t.oid = c.conrelid JOIN pg_class rt ON rt.oid = c.confrelid
    CROSS JOIN unnest(c.conkey, c.confkey) AS k(here, there)
    JOIN pg_attribute a ON a.attrelid = t.oid AND a.attnum = k.here
    JOIN pg_attribute ra ON ra.attrelid = rt.oid AND ra.attnum = k.there
    WHERE c.contype = 'f' AND t.relnamespace = 'public'::regnamespace
""")
CHECKS = sa.text("""
    SELECT conrelid::regclass::text AS table, conname AS name FROM pg_constraint
    WHERE contype = 'c' AND connamespace = 'public'::regnamespace AND conrelid <> 0
""")
POLICIES = sa.text("""
    SELECT tablename AS table, policyname AS name, roles::text[] AS roles, cmd, permissive,
        qual, with_check
    FROM pg_policies WHERE schemaname = 'public'
""")


async def relations(conn: AsyncConnection) -> list[Relation]:
    return [Relation(**row._mapping) for row in await conn.execute(RELATIONS)]


async def partitions(conn: AsyncConnection) -> list[Relation]:
    return [Relation(**row._mapping) for row in await conn.execute(PARTITIONS)]


async def org_columns(conn: AsyncConnection) -> dict[str, str]:
    """Return, for each table behind the wall, the column that its policy for tenants compares."""
    found = {}
    for policy in await conn.execute(POLICIES):
        if policy.roles == ["tollgate_app"]:
            matched = TENANT_POLICY.fullmatch(policy.qual)
            assert matched is not None, f"{policy.table}: {policy.qual}"
            found[policy.table] = matched[1]
    return found


async def populate(owner: AsyncEngine) -> dict[str, str]:
    """A row of each tenant in each table behind the wall; returns `org_columns`."""
    async with owner.begin() as conn:
        columns = await org_columns(conn)
        for check in await conn.execute(CHECKS):
            await conn.execute(sa.text(f'ALTER TABLE {check.table} DROP CONSTRAINT "{check.name}"'))
        by_table: dict[str, list[Column]] = {}
        for row in await conn.execute(COLUMNS):
            by_table.setdefault(row.table, []).append(Column(**row._mapping))
        for table in by_table:
            await conn.execute(sa.text(f"ALTER TABLE {table} DISABLE TRIGGER USER"))
        # References are filled in any order, and hold when all is there.
        await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
        references = {
            (row.table, row.column): (row.of_table, row.of_column)
            for row in await conn.execute(REFERENCES)
        }
        for table, whose in columns.items():
            for org in (ALICE, MALLORY):
                wanted = [
                    each
                    for each in by_table[table]
                    if each.required or each.name in (whose, "project_id", "password_hash")
                ]
                values = [literal(each, org, columns, references) for each in wanted]
                names = ", ".join(each.name for each in wanted)
                insert = f"INSERT INTO {table} ({names}) VALUES ({', '.join(values)})"
                await conn.execute(sa.text(insert))
    return columns


def literal(
    column: Column,
    org: str,
    org_columns: dict[str, str],
    references: dict[tuple[str, str], tuple[str, str]],
) -> str:
    """Return what `column` holds in the row of `org`; a reference holds what it refers to."""
    place = (column.table, column.name)
    if column.name == org_columns.get(column.table):
        return f"'{org}'"
    seen = {place}
    while (further := references.get(place)) is not None and further not in seen:
        place = further
        seen.add(place)
        if place == ("orgs", "id"):
            return f"'{org}'"
    if place in LITERALS_OF:
        return LITERALS_OF[place].format(label=id_of(*place, org=org))
    assert column.type in LITERALS, f"{column.table}.{column.name}: say what a {column.type} is"
    number = 1 if org == ALICE else 2
    return LITERALS[column.type].format(label=id_of(*place, org=org), number=number)


def id_of(table: str, column: str = "id", *, org: str = ALICE) -> str:
    """Return what a text column holds in the row of `org`."""
    return f"{table}.{column}.{org}"


IDS = {
    "org_id": ALICE,
    "api_key_id": id_of("api_keys"),
    "approval_id": id_of("mcp_approvals"),
    "batch_id": id_of("batches"),
    "cap_id": id_of("spend_caps"),
    "client_id": id_of("oauth_clients"),
    "credential_id": id_of("upstream_credentials"),
    "delivery_id": id_of("webhook_deliveries"),
    "endpoint_id": id_of("webhook_endpoints"),
    "entry_id": id_of("audit_entries"),
    "file_id": id_of("files"),
    "grant_id": id_of("oauth_grants"),
    "input_file_id": id_of("files"),
    "invite_id": id_of("invites"),
    "invoice_id": id_of("invoices"),
    "issuer_id": id_of("issuers"),
    "key_id": id_of("api_keys"),
    "line_id": id_of("invoice_lines"),
    "message_batch_id": id_of("batches"),
    "project_id": id_of("projects"),
    "conversation_id": id_of("conversations"),
    "item_id": id_of("conversation_items"),
    "response_id": id_of("responses"),
    "service_account_id": id_of("service_accounts"),
    "top_up_id": id_of("top_ups"),
    "user_id": id_of("users"),
}
"""The value with which a parameter of this name refers to Alice's row."""


async def rows_of_alice(db: AsyncEngine, columns: dict[str, str]) -> dict[str, list[str]]:
    async with db.connect() as conn:
        return {
            table: list(
                await conn.scalars(
                    sa.text(f"SELECT t::text FROM {table} t WHERE {column} = :org ORDER BY 1"),
                    {"org": ALICE},
                )
            )
            for table, column in columns.items()
        }
