"""Moves the callers of a model to another version of it step by step, and back at once when that
one does worse. Pure: what a rollout becomes after a look at how requests ended.

A step gives the new version a share of the organizations. Who has it keeps it while the share
grows. The last step lasts until an operator completes the rollout, unless it is all: then nobody is
left to compare with, and the rollout completes by itself. Before the first step the organizations
that will be first may be watched while the old version still serves all: where they fare worse than
others by themselves, that is allowed for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from gateway.registry.comparison import Comparison, Outcomes
from gateway.tenancy.errors import Conflict, InvalidField

RolloutState = Literal["running", "paused", "aborted", "taken_back", "completed"]
ACTIVE: tuple[RolloutState, ...] = ("running", "paused")
"""A rollout in another state has ended."""
WATCHED = -1
"""The step before the first one, in which nobody has the new version."""
ALL = 100
"""Percent. Where all are to have the new version it is everybody's: there is nobody to compare."""
MAX_STEPS = 20
MOST_AT_LEAST = 10_000_000
PARTS = 10_000
"""Organizations are told apart by a hash to hundredths of a percent."""


class RolloutProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what was seen of a rollout. `new` and `old`: what ended at this step, as far as it is
    in the comparison."""

    new: Outcomes = msgspec.field(default_factory=Outcomes)
    old: Outcomes = msgspec.field(default_factory=Outcomes)
    comparison: Comparison = msgspec.field(default_factory=Comparison)

    @property
    def as_seen(self) -> dict[str, Any]:
        """Return it as people see it: the counts of this step, and how far from a proof it is."""
        return {
            "new": msgspec.structs.asdict(self.new),
            "old": msgspec.structs.asdict(self.old),
            "part_of_proof": round(self.comparison.part_of_proof, 3),
        }


class ModelRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a model on its way to everybody."""

    id: str
    operator_org: str
    """The operator's organization, whose audit log has it."""
    model: str
    from_version: int
    to_version: int
    steps: tuple[int, ...]
    """The percentages of organizations, which grow."""
    least: int
    """A step lasts until so many requests of either version have ended."""
    watch: int
    """Requests that are watched before the first step; 0: none are."""
    state: RolloutState = "running"
    step: int = 0
    reason: str = ""
    """Says what ended it."""
    progress: RolloutProgress = msgspec.field(default_factory=RolloutProgress)
    created_at: datetime

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE

    @property
    def percent(self) -> int:
        """Return the share of the organizations that get the new version now."""
        return self.steps[self.step] if self.is_active and self.step != WATCHED else 0

    @property
    def compared_percent(self) -> int:
        """Return the share whose requests are compared with the others'."""
        return self.steps[max(self.step, 0)] if self.is_active else 0


def check_steps(steps: Sequence[int]) -> None:
    """Raises: InvalidField."""
    grows = all(one < next_one for one, next_one in zip(steps, steps[1:], strict=False))
    if not steps or not grows or steps[0] < 1 or steps[-1] > ALL or len(steps) > MAX_STEPS:
        raise InvalidField("steps", f"are 1 to {MAX_STEPS} percentages up to {ALL} that grow")
    if steps[0] == ALL:
        raise InvalidField("steps", "begin with less than all; a pin of all needs no rollout")


def is_within(org_id: str, rollout_id: str, percent: int) -> bool:
    """Tell whether an organization is among the first `percent` of a rollout. Another rollout has
    another order, and a larger percentage has all of a smaller one."""
    digest = hashlib.blake2b(f"{rollout_id}\n{org_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % PARTS < percent * PARTS // 100


def paused(rollout: ModelRollout) -> ModelRollout:
    """Keep the share as it is. A worse version is taken back all the same. Raises: Conflict."""
    return changed(rollout, "paused", ("running",))


def resumed(rollout: ModelRollout) -> ModelRollout:
    """Raises: Conflict."""
    return changed(rollout, "running", ("paused",))


def aborted(rollout: ModelRollout) -> ModelRollout:
    """Give everybody the old version. Raises: Conflict."""
    return changed(rollout, "aborted", ACTIVE, "an operator ended it")


def completed(rollout: ModelRollout) -> ModelRollout:
    """Give everybody the new version. Raises: Conflict."""
    return changed(rollout, "completed", ACTIVE, "an operator completed it")


def changed(
    rollout: ModelRollout, state: RolloutState, of: Sequence[RolloutState], reason: str = ""
) -> ModelRollout:
    if rollout.state not in of:
        raise Conflict("state", f"the rollout is {rollout.state.replace('_', ' ')}")
    return msgspec.structs.replace(rollout, state=state, reason=reason)


def look(
    rollout: ModelRollout, new: Outcomes, old: Outcomes, *, is_served: bool = True
) -> ModelRollout:
    """Return what becomes of a rollout after all that ended at its step by now: itself, where that
    says nothing more than the last look. `is_served`: the new version stands in the settings."""
    if not rollout.is_active:
        return rollout
    if not is_served:
        return changed(rollout, "taken_back", ACTIVE, "the version is not served any more")
    known = rollout.progress
    more_new, more_old = new.since(known.new), old.since(known.old)
    if rollout.step == WATCHED:
        return watched(rollout, new, old) if more_new.requests or more_old.requests else rollout
    if not more_new.requests or not more_old.requests:
        return rollout  # a block of one version alone says nothing: it goes on
    comparison = known.comparison.copy()
    comparison.add(more_new, more_old)
    rollout = msgspec.structs.replace(
        rollout, progress=RolloutProgress(new=new, old=old, comparison=comparison)
    )
    if comparison.is_worse:
        return changed(rollout, "taken_back", ACTIVE, reason_of(comparison))
    if rollout.state == "paused" or min(new.requests, old.requests) < rollout.least:
        return rollout
    return grown(rollout)


def watched(rollout: ModelRollout, new: Outcomes, old: Outcomes) -> ModelRollout:
    """Return what becomes of a rollout in which nobody has the new version yet."""
    if rollout.state == "running" and min(new.requests, old.requests) >= rollout.watch:
        progress = RolloutProgress(comparison=Comparison.allowing(new, old))
        return msgspec.structs.replace(rollout, step=0, progress=progress)
    return msgspec.structs.replace(rollout, progress=RolloutProgress(new=new, old=old))


def grown(rollout: ModelRollout) -> ModelRollout:
    """Return the rollout at its next step, or completed; at the last one it stays."""
    if rollout.step + 1 == len(rollout.steps):
        return rollout
    next_percent = rollout.steps[rollout.step + 1]
    if next_percent == ALL:
        return changed(rollout, "completed", ACTIVE, "it did no worse at any step")
    comparison = rollout.progress.comparison.copy()
    comparison.dilute(rollout.percent / next_percent)
    return msgspec.structs.replace(
        rollout, step=rollout.step + 1, progress=RolloutProgress(comparison=comparison)
    )


def reason_of(comparison: Comparison) -> str:
    """Return why a version is taken back, as operators read it."""
    regard = comparison.worst
    found = comparison.evidence[regard]
    words = regard.replace("_", " ")
    return (
        f"{words} {found.new.share:.1%} of {found.new.requests} requests,"
        f" the version before {found.old.share:.1%} of {found.old.requests}"
    )
