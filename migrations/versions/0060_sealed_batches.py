"""Seal files, and what batches are asked and answer. Rows of before are sealed by the gateways, in
the background: where the secret is null a row is not sealed yet.

Revision ID: 0060
Revises: 0059
"""

from __future__ import annotations

from alembic import op

revision = "0060"
down_revision = "0059"
branch_labels = None
depends_on = None

STATEMENTS = (
    "ALTER TABLE files ADD COLUMN secret_id text",
    "ALTER TABLE file_chunks ADD COLUMN secret_id text",
    "ALTER TABLE batches ADD COLUMN metadata_secret_id text, ADD COLUMN errors_secret_id text",
    # Of a sealed id equal ones differ; who reads the input finds them.
    """
    ALTER TABLE batch_lines DROP CONSTRAINT batch_lines_once,
        ADD COLUMN secret_id text, ADD COLUMN answer_secret_id text
    """,
    "CREATE INDEX files_unsealed ON files (id) WHERE secret_id IS NULL AND filename <> ''",
    "CREATE INDEX file_chunks_unsealed ON file_chunks (file_id, number) WHERE secret_id IS NULL",
    "CREATE INDEX batch_lines_unsealed ON batch_lines (batch_id, number) WHERE secret_id IS NULL",
    """
    CREATE INDEX batch_answers_unsealed ON batch_lines (batch_id, number)
    WHERE answer_secret_id IS NULL AND answer <> ''
    """,
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Sealed rows stay sealed, and are of no use to what came before."""
    for name in ("files", "file_chunks", "batch_lines", "batch_answers"):
        op.execute(f"DROP INDEX {name}_unsealed")
    op.execute("ALTER TABLE batch_lines DROP COLUMN secret_id, DROP COLUMN answer_secret_id")
    op.execute("ALTER TABLE batches DROP COLUMN metadata_secret_id, DROP COLUMN errors_secret_id")
    op.execute("ALTER TABLE file_chunks DROP COLUMN secret_id")
    op.execute("ALTER TABLE files DROP COLUMN secret_id")
