"""Keep what upstreams claimed of a request beyond what it can have used, and its alert.

Revision ID: 0059
Revises: 0058
"""

from __future__ import annotations

from alembic import op

from migrations.walls import open_wall, protect

revision = "0059"
down_revision = "0058"
branch_labels = None
depends_on = None

MEASURES = (
    "'spend', 'unusual_spend', 'tokens_per_minute', 'input_tokens_per_minute',"
    " 'output_tokens_per_minute', 'credits_low', 'credits_exhausted'"
)


def upgrade() -> None:
    op.execute(
        """
        CREATE TABLE disputed_usage (
            event_id text PRIMARY KEY,
            request_id text NOT NULL,
            org text NOT NULL,
            model text NOT NULL,
            upstream text NOT NULL,
            billed_tokens bigint NOT NULL,
            input_tokens bigint NOT NULL
                CONSTRAINT disputed_usage_input CHECK (input_tokens >= 0),
            output_tokens bigint NOT NULL
                CONSTRAINT disputed_usage_output CHECK (output_tokens >= 0),
            admitted_at timestamptz NOT NULL,
            CONSTRAINT disputed_usage_some CHECK (input_tokens > 0 OR output_tokens > 0)
        )
        """
    )
    op.execute("CREATE INDEX disputed_usage_of_org ON disputed_usage (org, event_id)")
    op.execute(
        "CREATE TRIGGER disputed_usage_immutable BEFORE UPDATE OR DELETE ON disputed_usage"
        " FOR EACH ROW EXECUTE FUNCTION refuse_to_change()"
    )
    protect("disputed_usage", "org", read_only=True)
    measure_is_one_of(f"{MEASURES}, 'disputed_usage'")


def downgrade() -> None:
    op.execute("DELETE FROM alerts WHERE measure = 'disputed_usage'")
    measure_is_one_of(MEASURES)
    open_wall("disputed_usage")
    op.execute("DROP TABLE disputed_usage")


def measure_is_one_of(names: str) -> None:
    op.execute(
        "ALTER TABLE alerts DROP CONSTRAINT alerts_measure,"
        f" ADD CONSTRAINT alerts_measure CHECK (measure IN ({names}))"
    )
