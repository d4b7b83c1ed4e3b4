"""Versions of a model, a pin of everybody, and a rollout."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from gateway.registry.rollout import ModelRollout
from gateway.registry.version_table import (
    INSTALLATION,
    ModelPin,
    RegisteredVersion,
    VersionTable,
)

NOW = datetime(2026, 11, 29, tzinfo=UTC)


def versions_of(model: str, *others: str, pinned_to: str) -> VersionTable:
    """Return a model and others that are versions of it, with everybody pinned to one of them."""
    versions = [
        RegisteredVersion(
            id=f"mver_{name}",
            model=model,
            version=1 + at,
            served_by=name,
            digest=name,
            created_at=NOW,
        )
        for at, name in enumerate((model, *others))
    ]
    number = next(each.version for each in versions if each.served_by == pinned_to)
    pin = ModelPin(
        id="mpin_all",
        model=model,
        scope="installation",
        scope_id=INSTALLATION,
        version=number,
        created_at=NOW,
    )
    return VersionTable(versions, [pin])


def rollout(**fields: Any) -> ModelRollout:
    """Return a rollout of version 2 of `qwen`."""
    given: dict[str, Any] = {
        "id": "mrol_1",
        "operator_org": "org_0",
        "model": "qwen",
        "from_version": 1,
        "to_version": 2,
        "steps": (5, 25, 50),
        "least": 50,
        "watch": 0,
        "created_at": NOW,
    }
    return ModelRollout(**{**given, **fields})
