"""Run by Alembic for every command. The connection, its transaction and its lock belong to
`runner`.
"""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
