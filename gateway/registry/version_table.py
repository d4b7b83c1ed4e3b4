"""Says which version of a model a caller gets: that of the most specific pin, else the model as its
settings have it. Pure data, replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Literal, get_args

import msgspec

from gateway.principal import Principal

PinScope = Literal["installation", "org", "project", "key"]
PIN_SCOPES: tuple[PinScope, ...] = get_args(PinScope)
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
    pin: ModelPin
    """The pin that keeps the caller there."""


class VersionedModel:
    """The versions of one model, and its pins by the ids of their scopes, whose prefixes differ."""

    def __init__(self, versions: Iterable[RegisteredVersion], pins: Iterable[ModelPin]) -> None:
        self.versions = {each.version: each for each in versions}
        self._pinned = {
            pin.scope_id: ChosenVersion(self.versions[pin.version], pin) for pin in pins
        }

    def choose(self, principal: Principal) -> ChosenVersion | None:
        """Return the version for a caller; None: the model as its settings have it."""
        pinned = self._pinned
        if not pinned:
            return None
        return (
            pinned.get(principal.key_id)
            or (pinned.get(principal.project_id) if principal.project_id else None)
            or pinned.get(principal.org_id)
            or pinned.get(INSTALLATION)
        )


class VersionTable:
    """The versions of all models at one moment. `models`: those that have any, by name."""

    def __init__(
        self, versions: Iterable[RegisteredVersion] = (), pins: Iterable[ModelPin] = ()
    ) -> None:
        found: dict[str, list[RegisteredVersion]] = {}
        for version in versions:
            found.setdefault(version.model, []).append(version)
        pinned: dict[str, list[ModelPin]] = {}
        for pin in pins:
            pinned.setdefault(pin.model, []).append(pin)
        self.models: Mapping[str, VersionedModel] = {
            model: VersionedModel(each, pinned.get(model, ())) for model, each in found.items()
        }
        self._numbers = {each.served_by: each for several in found.values() for each in several}

    def number_of(self, model: str, served_by: str) -> int | None:
        """Return the number of the version of `model` that a served model is; None: none."""
        found = self._numbers.get(served_by)
        return found.version if found is not None and found.model == model else None


NO_VERSIONS = VersionTable()
