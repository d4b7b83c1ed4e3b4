"""Describes a database's schema by its catalog: each thing by its name, with its definition."""

from __future__ import annotations

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db import create_engine

COLUMNS = text("""
    SELECT c.relname || '.' || a.attname, c.relname, format_type(a.atttypid, a.atttypmod),
        a.attnotnull, pg_get_expr(d.adbin, d.adrelid),
        a.attidentity <> '' OR a.attgenerated <> '' AS is_made
    FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
    LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p', 'v')
        AND a.attnum > 0 AND NOT a.attisdropped
""")
# Postgres 18 keeps NOT NULL as constraints, too: the columns say that already.
CONSTRAINTS = text("""
    SELECT c.relname || '.' || k.conname, c.relname,
        k.contype::text || ' ' || pg_get_constraintdef(k.oid)
    FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid
    WHERE c.relnamespace = 'public'::regnamespace AND k.contype <> 'n'
""")
INDEXES = text("""
    SELECT i.relname, c.relname, pg_get_indexdef(x.indexrelid) || ' valid: ' || x.indisvalid
    FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid JOIN pg_class c ON c.oid = x.indrelid
    WHERE c.relnamespace = 'public'::regnamespace
""")
TRIGGERS = text("""
    SELECT c.relname || '.' || t.tgname, c.relname, pg_get_triggerdef(t.oid)
    FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
    WHERE c.relnamespace = 'public'::regnamespace AND NOT t.tgisinternal
""")
POLICIES = text("""
    SELECT tablename || '.' || policyname, tablename,
        concat_ws(' ', permissive, roles, cmd, qual, with_check)
    FROM pg_policies WHERE schemaname = 'public'
""")
GRANTS = text("""
    SELECT c.relname || ' to ' || acl.grantee::regrole, c.relname,
        string_agg(acl.privilege_type, ',' ORDER BY acl.privilege_type)
    FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) acl
    WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'S')
        AND acl.grantee::regrole::text LIKE 'tollgate\\_%'
    GROUP BY 1, 2
""")
FUNCTIONS = text("""
    SELECT p.oid::regprocedure::text, '', pg_get_functiondef(p.oid)
    FROM pg_proc p WHERE p.pronamespace = 'public'::regnamespace AND p.prokind = 'f'
""")


class ColumnState(msgspec.Struct, frozen=True):
    table: str
    type: str
    is_required: bool
    default: str | None
    is_made: bool
    """Postgres makes its values: an identity, or one that is computed."""

    @property
    def may_be_left_out(self) -> bool:
        return not self.is_required or self.default is not None or self.is_made


class Definition(msgspec.Struct, frozen=True):
    table: str
    """Empty: of no table."""
    text: str


class Schema(msgspec.Struct, frozen=True, kw_only=True):
    """Everything by its name."""

    columns: dict[str, ColumnState]
    constraints: dict[str, Definition]
    indexes: dict[str, Definition]
    triggers: dict[str, Definition]
    policies: dict[str, Definition]
    grants: dict[str, Definition]
    functions: dict[str, Definition]

    @property
    def tables(self) -> set[str]:
        return {column.table for column in self.columns.values()}


async def schema_of(database_url: str) -> Schema:
    db = create_engine(database_url)
    try:
        async with db.connect() as connection:
            return await read_schema(connection)
    finally:
        await db.dispose()


async def read_schema(connection: AsyncConnection) -> Schema:
    async def definitions(query: object) -> dict[str, Definition]:
        rows = await connection.execute(query)  # type: ignore[call-overload]
        return {name: Definition(table, definition) for name, table, definition in rows}

    columns = await connection.execute(COLUMNS)
    return Schema(
        columns={name: ColumnState(*rest) for name, *rest in columns},
        constraints=await definitions(CONSTRAINTS),
        indexes=await definitions(INDEXES),
        triggers=await definitions(TRIGGERS),
        policies=await definitions(POLICIES),
        grants=await definitions(GRANTS),
        functions=await definitions(FUNCTIONS),
    )
