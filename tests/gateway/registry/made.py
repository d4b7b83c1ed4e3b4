"""Versions of a model, a pin of everybody, and a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.registry.comparison import Outcomes
from gateway.registry.rollout import ModelRollout, Seen
from gateway.registry.version_table import (
    INSTALLATION,
    ModelPin,
    RegisteredVersion,
    VersionTable,
)

NOW = datetime(2026, 11, 29, tzinfo=UTC)
NOTHING: Mapping[int, Mapping[int, Outcomes]] = {}


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


def seen(rollout: ModelRollout, new: Outcomes, old: Outcomes, before: Seen = NOTHING) -> Seen:
    """Return what ended at a rollout's step, in all groups alike, beside what ended before."""
    ended = {**divided(rollout.new_groups, new), **divided(rollout.old_groups, old)}
    return {**before, rollout.step: ended}


def divided(groups: Sequence[int], outcomes: Outcomes) -> dict[int, Outcomes]:
    """Return parts of outcomes, as like each other as may be."""
    return {
        group: Outcomes(
            **{
                name: (at + 1) * count // len(groups) - at * count // len(groups)
                for name, count in msgspec.structs.asdict(outcomes).items()
            }
        )
        for at, group in enumerate(groups)
    }
