"""Keep what suites of evaluation said of versions, which a rollout may need before it begins.

Revision ID: 0080
Revises: 0079
"""

from __future__ import annotations

from alembic import op

from migrations.walls import share

revision = "0080"
down_revision = "0079"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE model_evaluations (
            id text PRIMARY KEY,
            model text NOT NULL,
            version integer NOT NULL,
            digest text NOT NULL,
            suite text NOT NULL,
            passed boolean NOT NULL,
            evidence text NOT NULL,
            created_at timestamptz NOT NULL DEFAULT now()
        )
        """
    )
    op.execute("CREATE INDEX model_evaluations_digest ON model_evaluations (model, digest, suite)")
    share("model_evaluations", readable=False)


def downgrade() -> None:
    op.execute("DROP TABLE model_evaluations")
