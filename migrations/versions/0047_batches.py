"""Batches and their lines.

Revision ID: 0047
Revises: 0046
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0047"
down_revision = "0046"
branch_labels = None
depends_on = None

STATUSES = (
    *("validating", "failed", "in_progress", "finalizing"),
    *("completed", "expired", "cancelling", "cancelled"),
)
STATEMENTS = (
    f"""
    CREATE TABLE batches (
        id text PRIMARY KEY,
        org_id text NOT NULL REFERENCES orgs,
        project_id text NOT NULL,
        key_id text NOT NULL,
        endpoint text NOT NULL,
        input_file_id text NOT NULL,
        completion_window text NOT NULL,
        metadata jsonb,
        output_expires_after_s bigint,
        tags jsonb,
        status text NOT NULL CONSTRAINT batches_status CHECK
            (status IN ({", ".join(f"'{each}'" for each in STATUSES)})),
        model text,
        errors jsonb,
        num_total bigint NOT NULL DEFAULT 0,
        num_completed bigint NOT NULL DEFAULT 0,
        num_failed bigint NOT NULL DEFAULT 0,
        input_tokens bigint NOT NULL DEFAULT 0,
        cached_tokens bigint NOT NULL DEFAULT 0,
        output_tokens bigint NOT NULL DEFAULT 0,
        reasoning_tokens bigint NOT NULL DEFAULT 0,
        output_file_id text,
        error_file_id text,
        created_at timestamptz NOT NULL DEFAULT now(),
        expires_at timestamptz NOT NULL,
        in_progress_at timestamptz,
        finalizing_at timestamptz,
        completed_at timestamptz,
        failed_at timestamptz,
        expired_at timestamptz,
        cancelling_at timestamptz,
        cancelled_at timestamptz,
        dispatched_at timestamptz,
        leased_by text,
        leased_until timestamptz,
        CONSTRAINT batches_of_org UNIQUE (org_id, id),
        CONSTRAINT batches_of_project
            FOREIGN KEY (org_id, project_id) REFERENCES projects (org_id, id),
        CONSTRAINT batches_counts CHECK (num_completed + num_failed <= num_total)
    )
    """,
    "CREATE INDEX batches_listed ON batches (org_id, project_id, id)",
    """
    CREATE INDEX batches_live ON batches (id)
    WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
    """,
    """
    CREATE INDEX batches_untold ON batches (id) WHERE dispatched_at IS NULL
        AND status IN ('failed', 'completed', 'expired', 'cancelled')
    """,
    """
    CREATE TABLE batch_lines (
        batch_id text NOT NULL,
        number integer NOT NULL,
        org_id text NOT NULL,
        custom_id text NOT NULL,
        body bytea NOT NULL,
        state text NOT NULL DEFAULT 'open' CONSTRAINT batch_lines_state CHECK
            (state IN ('open', 'done', 'failed')),
        due_at timestamptz NOT NULL DEFAULT now(),
        losses integer NOT NULL DEFAULT 0,
        leased_by text,
        leased_until timestamptz,
        request_id text,
        event_id text,
        status smallint,
        code text,
        answer bytea,
        PRIMARY KEY (batch_id, number),
        CONSTRAINT batch_lines_once UNIQUE (batch_id, custom_id),
        CONSTRAINT batch_lines_of_batch FOREIGN KEY (org_id, batch_id)
            REFERENCES batches (org_id, id) ON DELETE CASCADE,
        CONSTRAINT batch_lines_billed CHECK ((state = 'done') = (event_id IS NOT NULL))
    )
    """,
    "CREATE INDEX batch_lines_open ON batch_lines (batch_id, number) WHERE state = 'open'",
)


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
    protect("batches")
    protect("batch_lines", delete=True)


def downgrade() -> None:
    for table in ("batch_lines", "batches"):
        open_wall(table)
        op.execute(f"DROP TABLE {table}")
