"""Run by Alembic for every command. The connection, its lock and its bounds belong to `runner`,
which also says whether all steps are one transaction or each is one of its own.
"""

from __future__ import annotations

from alembic import context

attributes = context.config.attributes
context.configure(
    connection=attributes["connection"],
    transaction_per_migration=attributes["transaction_per_migration"],
)
with context.begin_transaction():
    context.run_migrations()
