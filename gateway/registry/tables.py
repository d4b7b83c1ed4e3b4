"""The tables of the registry, as their migration makes them."""

from __future__ import annotations

import sqlalchemy as sa

from gateway.columns import moment_made, text

TOPIC = "model versions"
"""The triggers on these tables notify of this topic (`gateway.worker.work_listener`)."""
metadata = sa.MetaData()

versions = sa.Table(
    "model_versions",
    metadata,
    text("id", key=True),
    text("model"),
    sa.Column("version", sa.Integer, nullable=False),
    text("served_by"),
    text("digest"),
    moment_made(),
)

pins = sa.Table(
    "model_pins",
    metadata,
    text("id", key=True),
    text("model"),
    text("scope"),
    text("scope_id"),
    sa.Column("version", sa.Integer, nullable=False),
    moment_made(),
)
