"""Price lists: prices of their own, terms of a period, and which list an event was priced by.

Revision ID: 0027
Revises: 0026
"""

from __future__ import annotations

from alembic import op

from migrations.walls import ROLE_TENANT, open_wall, share

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

RULES = (
    # The slot is a range too, because that needs no extension; shifted, because a range of the
    # largest bigint would end beyond it.
    """
    CREATE TABLE price_rules (
        rule_id text PRIMARY KEY,
        price_list text NOT NULL,
        slot text NOT NULL,
        slot_id bigint GENERATED ALWAYS AS (hashtextextended(slot, 0) >> 1) STORED,
        content jsonb NOT NULL,
        valid tstzrange NOT NULL CHECK (NOT isempty(valid) AND NOT lower_inf(valid)),
        CONSTRAINT price_rules_no_overlap EXCLUDE USING gist
            (int8range(slot_id, slot_id, '[]') WITH &&, valid WITH &&)
    )
    """,
    """
    CREATE FUNCTION only_close_a_price_rule() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'UPDATE' AND upper_inf(OLD.valid) AND NOT upper_inf(NEW.valid)
            AND lower(NEW.valid) = lower(OLD.valid)
            AND (NEW.rule_id, NEW.price_list, NEW.slot, NEW.content)
                = (OLD.rule_id, OLD.price_list, OLD.slot, OLD.content)
        THEN
            RETURN NEW;
        END IF;
        RAISE EXCEPTION 'price rule % cannot change; add one with a later start', OLD.rule_id;
    END $$
    """,
    """
    CREATE TRIGGER price_rules_append_only BEFORE UPDATE OR DELETE ON price_rules
        FOR EACH ROW EXECUTE FUNCTION only_close_a_price_rule()
    """,
    """
    CREATE TRIGGER price_rules_keep BEFORE TRUNCATE ON price_rules
        FOR EACH STATEMENT EXECUTE FUNCTION refuse_to_change()
    """,
)


def upgrade() -> None:
    op.execute(
        """
        ALTER TABLE price_keys
            ADD COLUMN price_list text NOT NULL DEFAULT 'default',
            DROP CONSTRAINT price_keys_place,
            ADD CONSTRAINT price_keys_place
                UNIQUE (price_list, model, tier, component, min_total_input)
        """
    )
    op.execute("ALTER TABLE usage_events ADD COLUMN price_list text NOT NULL DEFAULT 'default'")
    for statement in RULES:
        op.execute(statement)
    share("price_rules", readable=False)
    # What one tenant has agreed upon is no other's business.
    op.execute(f"REVOKE SELECT ON prices, price_keys FROM {ROLE_TENANT}")


def downgrade() -> None:
    op.execute(f"GRANT SELECT ON prices, price_keys TO {ROLE_TENANT}")
    open_wall("price_rules")
    op.execute("DROP TABLE price_rules")
    op.execute("DROP FUNCTION only_close_a_price_rule")
    op.execute("ALTER TABLE usage_events DROP COLUMN price_list")
    op.execute(
        """
        ALTER TABLE price_keys
            DROP CONSTRAINT price_keys_place,
            DROP COLUMN price_list,
            ADD CONSTRAINT price_keys_place UNIQUE (model, tier, component, min_total_input)
        """
    )
