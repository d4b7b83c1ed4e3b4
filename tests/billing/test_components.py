"""Every price component is in each place that ARCHITECTURE.md names for one."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import tables
from billing.events import CALLS, COMPONENT_KINDS, COMPONENTS, Component, Quantities
from billing.ingestion import ingest

ROOT = Path(__file__).parents[2]


def parsed(path: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((ROOT / path).read_text())))


def test_the_three_lists_of_events_agree_and_have_one_order() -> None:
    """Ingestion writes quantities by their position."""
    assert get_args(Component) == COMPONENTS == Quantities.__struct_fields__
    items = [kind.line_item for kind in COMPONENT_KINDS.values()]
    assert len({*items}) == len(items)


async def test_the_migrations_have_all_columns_and_the_order_of_an_incoming_row(
    db: AsyncEngine,
) -> None:
    async with db.connect() as conn:
        found = await conn.execute(
            sa.text("SELECT table_name, column_name FROM information_schema.columns")
        )
        columns = {(row.table_name, row.column_name) for row in found}
        attributes = await conn.scalars(
            sa.text("""
                SELECT attname FROM pg_attribute JOIN pg_class c ON c.oid = attrelid
                WHERE c.relname = 'usage_row' ORDER BY attnum
            """)
        )
        assert tuple(attributes) == ingest.GIVEN
    wanted = {
        (table.name, column.name)
        for table in tables.metadata.tables.values()
        for column in table.columns
        if column.name in {*COMPONENTS, *tables.AMOUNTS, *tables.REQUESTS}
    }
    assert len(wanted) > 10 * len(COMPONENTS) and wanted - columns == set()


def test_the_gateway_meters_every_component() -> None:
    metered = {
        argument.arg
        for node in parsed("gateway/inference/metering.py")
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Quantities"
        for argument in node.keywords
        if argument.arg is not None
    }
    assert metered == set(COMPONENTS)


def test_a_spend_cap_reserves_every_component() -> None:
    """Tokens are reserved by INPUTS and OUTPUTS; what counts calls is named one by one."""
    nodes = parsed("gateway/limits/spending.py")
    imported = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "billing.events"
        for alias in node.names
    }
    assert imported >= {"INPUTS", "OUTPUTS"}
    named = {node.value for node in nodes if isinstance(node, ast.Constant)}
    assert {*CALLS} - named == set()
