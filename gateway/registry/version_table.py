"""Says which version of a model a caller gets: that of the most specific pin, of a rollout, or the
model as its settings have it. Replaced as a whole, but for the counts of how requests end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Literal, NamedTuple, get_args

import msgspec

from gateway.principal import Principal
from gateway.registry.comparison import Outcomes
from gateway.registry.rollout import ModelRollout, group_of

PinScope = Literal["installation", "org", "project", "key"]
PIN_SCOPES: tuple[PinScope, ...] = get_args(PinScope)
MAX_KNOWN_ORGS = 100_000
"""A process remembers of so many organizations in which group of a rollout they are."""
INSTALLATION = ""
"""The scope `installation` has this id."""


class RegisteredVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a model: another served model, whose engines or upstreams answer in its name."""

    id: str
    model: str
    """The name that customers ask for, and are billed by."""
    version: int
    served_by: str
    """The name of the served model."""
    digest: str
    """SHA-256 of config, tokenizer and weights, or of an upstream's address and model name."""
    created_at: datetime


class ModelPin(msgspec.Struct, frozen=True, kw_only=True):
    """Keeps a caller at a version, whatever rollouts do."""

    id: str
    model: str
    scope: PinScope
    scope_id: str
    version: int
    created_at: datetime


class ChosenVersion(msgspec.Struct, frozen=True):
    """The version that a caller gets."""

    version: RegisteredVersion
    pin: ModelPin | None
    """The pin that keeps the caller there; None: a rollout does."""


class Tally:
    """Counts how requests end, by the group of their organization, until the counts are taken."""

    def __init__(self) -> None:
        self._ended: dict[int, Outcomes] = {}

    def add(self, ended: Outcomes, group: int) -> None:
        self._ended.setdefault(group, Outcomes()).add(ended)

    def take(self) -> dict[int, Outcomes]:
        """Return what was counted since the last time."""
        taken, self._ended = self._ended, {}
        return taken

    def give_back(self, taken: Mapping[int, Outcomes]) -> None:
        """Count again what was taken, and came nowhere."""
        for group, ended in taken.items():
            self.add(ended, group)


class ComparedRequest(NamedTuple):
    """Says that a request is compared: where it is counted, and in which group."""

    tally: Tally
    group: int
    version: int
    """The version that serves it."""


class RolloutShare:
    """Says who gets the new version at one step of a rollout, and counts in this process how
    requests of either end."""

    def __init__(self, rollout: ModelRollout, versions: Mapping[int, RegisteredVersion]) -> None:
        self.rollout = rollout
        self.old_version = versions[rollout.from_version]
        self.new_version = versions[rollout.to_version]
        self.tally = Tally()
        self._groups: dict[str, int] = {}
        self._percent = rollout.percent
        self._first_compared = rollout.new_groups.start
        self._chosen = ChosenVersion(self.new_version, None)

    def choose(self, org_id: str) -> ChosenVersion | None:
        """Return the new version, for those who have it."""
        return self._chosen if self._percent and self._group_of(org_id) < self._percent else None

    def compared(self, org_id: str, served_by: str) -> ComparedRequest | None:
        """Return how a request of an organization is compared; None: it came to the new version at
        an earlier step, or is served by another version than the rollout says, as while the new one
        is away."""
        group = self._group_of(org_id)
        serving = self.new_version if group < self._percent else self.old_version
        if group < self._first_compared or served_by != serving.served_by:
            return None
        return ComparedRequest(self.tally, group, serving.version)

    def go_on(self, before: RolloutShare) -> None:
        """Go on with the counts of the same step."""
        if (before.rollout.id, before.rollout.step) == (self.rollout.id, self.rollout.step):
            self.tally = before.tally

    def _group_of(self, org_id: str) -> int:
        found = self._groups.get(org_id)
        if found is None:
            if len(self._groups) >= MAX_KNOWN_ORGS:
                self._groups.clear()
            found = self._groups[org_id] = group_of(org_id, self.rollout.id)
        return found


class VersionedModel:
    """The versions of one model, and its pins by the ids of their scopes, whose prefixes differ."""

    def __init__(
        self,
        versions: Iterable[RegisteredVersion],
        pins: Iterable[ModelPin],
        rollout: ModelRollout | None = None,
    ) -> None:
        self.versions = {each.version: each for each in versions}
        self.share = None if rollout is None else RolloutShare(rollout, self.versions)
        """The share of the rollout that is under way."""
        self._pinned = {
            pin.scope_id: ChosenVersion(self.versions[pin.version], pin) for pin in pins
        }

    def choose(self, principal: Principal) -> ChosenVersion | None:
        """Return the version for a caller; None: the model as its settings have it."""
        if not self._pinned and self.share is None:
            return None
        if self._pinned and (pinned := self._pinned_to(principal)) is not None:
            return pinned
        if self.share is not None and (rolled := self.share.choose(principal.org_id)) is not None:
            return rolled
        return self.pinned_for_all

    @property
    def pinned_for_all(self) -> ChosenVersion | None:
        """Return the version of whoever has no nearer pin, without a rollout."""
        return self._pinned.get(INSTALLATION)

    def compared(self, principal: Principal, served_by: str) -> ComparedRequest | None:
        """Return how a request is compared; None: no rollout does that."""
        if self.share is None or (self._pinned and self._pinned_to(principal) is not None):
            return None
        return self.share.compared(principal.org_id, served_by)

    def _pinned_to(self, principal: Principal) -> ChosenVersion | None:
        """Return what a pin of the caller's own says."""
        pinned = self._pinned
        return (
            pinned.get(principal.key_id)
            or (pinned.get(principal.project_id) if principal.project_id else None)
            or pinned.get(principal.org_id)
        )


class VersionTable:
    """The versions of all models at one moment. `models`: those that have any, by name."""

    def __init__(
        self,
        versions: Iterable[RegisteredVersion] = (),
        pins: Iterable[ModelPin] = (),
        rollouts: Iterable[ModelRollout] = (),
    ) -> None:
        found: dict[str, list[RegisteredVersion]] = {}
        for version in versions:
            found.setdefault(version.model, []).append(version)
        pinned: dict[str, list[ModelPin]] = {}
        for pin in pins:
            pinned.setdefault(pin.model, []).append(pin)
        under_way = {rollout.model: rollout for rollout in rollouts}
        self.models: Mapping[str, VersionedModel] = {
            model: VersionedModel(each, pinned.get(model, ()), under_way.get(model))
            for model, each in found.items()
        }
        self._numbers = {each.served_by: each for several in found.values() for each in several}

    def number_of(self, model: str, served_by: str) -> int | None:
        """Return the number of the version of `model` that a served model is; None: none."""
        found = self._numbers.get(served_by)
        return found.version if found is not None and found.model == model else None

    @property
    def shares(self) -> list[RolloutShare]:
        """Return those of the rollouts that are under way."""
        return [each.share for each in self.models.values() if each.share is not None]

    def go_on(self, before: VersionTable) -> None:
        """Go on with what was counted by the table before."""
        for model, versioned in self.models.items():
            known = before.models.get(model)
            if versioned.share is not None and known is not None and known.share is not None:
                versioned.share.go_on(known.share)


NO_VERSIONS = VersionTable()
