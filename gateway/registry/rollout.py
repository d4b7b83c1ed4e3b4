"""Moves the callers of a model to another version of it step by step, and back at once when that
one does worse. Pure: what a rollout becomes after a look at how requests ended.

A step gives the new version a share of the organizations. Who has it keeps it while the share
grows. The last step lasts until an operator completes the rollout, unless it is all: then nobody is
left to compare with, and the rollout completes by itself. Before the first step the organizations
that will be first are watched while the old version still serves all, so that they are compared
with what they were themselves.

Organizations are counted in 100 groups of one size, by the hash that also says who is first. At
each step those that have come to the new version are compared with those that still have the old
one. Those that came earlier were compared then, and the evidence of the steps is multiplied.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from gateway.registry.comparison import Comparison, Outcomes, total
from gateway.registry.spread import concentration
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
GROUPS = range(ALL)
"""Each has a hundredth of the organizations."""
Seen = Mapping[int, Mapping[int, Outcomes]]
"""How requests ended, by the step and the group of their organizations."""


class RolloutProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what was seen of a rollout. `new` and `old`: what ended at this step, of those who got
    the new version at it and of those who have the old one, as far as it is in the comparison."""

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
    def new_groups(self) -> range:
        """Return the groups that got the new version at this step, or get it at the first one."""
        first = self.steps[self.step - 1] if self.step > 0 else 0
        return range(first, self.steps[max(self.step, 0)])

    @property
    def old_groups(self) -> range:
        """Return the groups that the others are compared with."""
        return range(self.steps[max(self.step, 0)], ALL)


def check_steps(steps: Sequence[int]) -> None:
    """Raises: InvalidField."""
    grows = all(one < next_one for one, next_one in zip(steps, steps[1:], strict=False))
    if not steps or not grows or steps[0] < 1 or steps[-1] > ALL or len(steps) > MAX_STEPS:
        raise InvalidField("steps", f"are 1 to {MAX_STEPS} percentages up to {ALL} that grow")
    if steps[0] == ALL:
        raise InvalidField("steps", "begin with less than all; a pin of all needs no rollout")


def group_of(org_id: str, rollout_id: str) -> int:
    """Return the group of an organization, 0 to 99: who is in a lower one is first. Another rollout
    has another order."""
    digest = hashlib.blake2b(f"{rollout_id}\n{org_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % 10_000 // ALL


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


def look(rollout: ModelRollout, seen: Seen, *, is_served: bool = True) -> ModelRollout:
    """Return what becomes of a rollout after all that ended by now: itself, where that says nothing
    more than the last look. `is_served`: the new version stands in the settings."""
    if not rollout.is_active:
        return rollout
    if not is_served:
        return changed(rollout, "taken_back", ACTIVE, "the version is not served any more")
    known, ended = rollout.progress, seen.get(rollout.step, {})
    new, old = total_of(ended, rollout.new_groups), total_of(ended, rollout.old_groups)
    more_new, more_old = new.since(known.new), old.since(known.old)
    if rollout.step == WATCHED:
        return (
            watched(rollout, new, old, seen) if more_new.requests or more_old.requests else rollout
        )
    if not more_new.requests or not more_old.requests:
        return rollout  # a block of one version alone says nothing: it goes on
    comparison = known.comparison.copy()
    if has_grown(known.old.requests, old.requests):
        learn_spread(rollout, comparison, seen)
    comparison.add(more_new, more_old)
    rollout = msgspec.structs.replace(
        rollout, progress=RolloutProgress(new=new, old=old, comparison=comparison)
    )
    if comparison.is_worse:
        return changed(rollout, "taken_back", ACTIVE, reason_of(comparison))
    if rollout.state == "paused" or min(new.requests, old.requests) < rollout.least:
        return rollout
    return grown(rollout, seen)


def watched(rollout: ModelRollout, new: Outcomes, old: Outcomes, seen: Seen) -> ModelRollout:
    """Return what becomes of a rollout in which nobody has the new version yet."""
    if rollout.state == "running" and min(new.requests, old.requests) >= rollout.watch:
        return at_next_step(rollout, seen)
    return msgspec.structs.replace(rollout, progress=RolloutProgress(new=new, old=old))


def grown(rollout: ModelRollout, seen: Seen) -> ModelRollout:
    """Return the rollout at its next step, or completed; at the last one it stays."""
    if rollout.step + 1 == len(rollout.steps):
        return rollout
    if rollout.steps[rollout.step + 1] == ALL:
        return changed(rollout, "completed", ACTIVE, "it did no worse at any step")
    return at_next_step(rollout, seen)


def at_next_step(rollout: ModelRollout, seen: Seen) -> ModelRollout:
    """Return the rollout at its next step, with what is known of those who come to the new version
    from when they had the old one."""
    comparison = rollout.progress.comparison.copy()
    comparison.begin_step()
    after = msgspec.structs.replace(
        rollout, step=rollout.step + 1, progress=RolloutProgress(comparison=comparison)
    )
    for step, ended in seen.items():
        if step < after.step:
            comparison.watch(total_of(ended, after.new_groups), total_of(ended, after.old_groups))
    return after


def has_grown(before: int, now: int) -> bool:
    """Tell whether there is a tenth more by now: the spread is learnt from time to time."""
    return not before or int(math.log(now, 1.1)) > int(math.log(before, 1.1))


def learn_spread(rollout: ModelRollout, comparison: Comparison, seen: Seen) -> None:
    """Learn how unlike the groups are, by all that they got of the old version."""
    of_old = [
        total(seen[step].get(group, Outcomes()) for step in seen if has_old(rollout, step, group))
        for group in GROUPS
    ]
    concentrations = (
        concentration(
            sum(ended[group].requests for ended in seen.values() if group in ended)
            for group in groups
        )
        for groups in (rollout.new_groups, rollout.old_groups)
    )
    comparison.learn_spread(of_old, sum(concentrations))


def has_old(rollout: ModelRollout, step: int, group: int) -> bool:
    """Tell whether a group has the old version at a step."""
    return step == WATCHED or group >= rollout.steps[step]


def total_of(ended: Mapping[int, Outcomes], groups: Collection[int]) -> Outcomes:
    return total(each for group, each in ended.items() if group in groups)


def reason_of(comparison: Comparison) -> str:
    """Return why a version is taken back, as operators read it."""
    regard = comparison.worst
    found = comparison.evidence[regard]
    words = regard.replace("_", " ")
    of_same = found.before
    before = f", {of_same.share:.1%} of {of_same.requests} before" if of_same.requests else ""
    return (
        f"{words} {found.new.share:.1%} of {found.new.requests} requests{before};"
        f" the version before {found.old.share:.1%} of {found.old.requests}"
    )
