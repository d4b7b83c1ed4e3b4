"""Keep the rollouts of versions, and how the requests of either version ended at each step. A
rollout that changes who gets which version tells every worker; what only adds to its evidence does
not.

Revision ID: 0079
Revises: 0078
"""

from __future__ import annotations

from alembic import op

from migrations.walls import share

revision = "0079"
down_revision = "0078"
branch_labels = None
depends_on = None

TOPIC = "model versions"
STATEMENTS = (
    """
    CREATE TABLE model_rollouts (
        id text PRIMARY KEY,
        operator_org text NOT NULL,
        model text NOT NULL,
        from_version integer NOT NULL,
        to_version integer NOT NULL CHECK (to_version <> from_version),
        steps integer[] NOT NULL,
        least integer NOT NULL CHECK (least > 0),
        watch integer NOT NULL CHECK (watch >= 0),
        state text NOT NULL
            CHECK (state IN ('running', 'paused', 'aborted', 'taken_back', 'completed')),
        step integer NOT NULL CHECK (step >= -1),
        reason text NOT NULL,
        progress bytea NOT NULL,
        created_at timestamptz NOT NULL DEFAULT now()
    )
    """,
    """
    CREATE UNIQUE INDEX model_rollouts_active ON model_rollouts (model)
        WHERE state IN ('running', 'paused')
    """,
    """
    CREATE TABLE model_rollout_outcomes (
        rollout_id text NOT NULL REFERENCES model_rollouts (id) ON DELETE CASCADE,
        step integer NOT NULL,
        is_new boolean NOT NULL,
        requests bigint NOT NULL,
        refused bigint NOT NULL,
        failed bigint NOT NULL,
        empty bigint NOT NULL,
        cut_off bigint NOT NULL,
        late bigint NOT NULL,
        PRIMARY KEY (rollout_id, step, is_new)
    )
    """,
    f"""
    CREATE TRIGGER model_rollouts_work
        AFTER INSERT OR DELETE OR UPDATE OF state, step ON model_rollouts
        FOR EACH ROW EXECUTE FUNCTION tell_of_work('{TOPIC}')
    """,
)
TABLES = ("model_rollouts", "model_rollout_outcomes")


def upgrade() -> None:
    for statement in STATEMENTS:
        op.execute(statement)
    for table in TABLES:
        share(table, readable=False, delete=True)


def downgrade() -> None:
    for table in reversed(TABLES):
        op.execute(f"DROP TABLE {table}")
