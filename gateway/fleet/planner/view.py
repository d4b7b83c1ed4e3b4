"""Holds what a home's planner last decided, in a file that its workers read for operators."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gateway.fleet.planner.decision import Cause

MAX_CHANGES = 32


class GivenReason(msgspec.Struct, frozen=True):
    cause: Cause
    replicas: int
    text: str


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model. Times are Unix seconds, rates per second."""

    model: str
    least: int
    most: int
    running: int
    starting: int = 0
    """Beside those that run; of pods always 0: those wanted count as running."""
    wanted: int
    reasons: list[GivenReason]
    """The one that counts first."""
    rate: float
    expected_rate: float
    """When a replica that is started now would serve."""
    work: float
    """Replicas' work a second then."""
    start_s: float | None
    """How long the last replica took to start; None: none was seen to."""
    problem: str = ""
    """Why there are not as many as wanted."""


class PlacedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that was placed on one of the devices that the settings name."""

    engine: str
    """The name of the replica that it is."""
    device: str
    bytes: int
    """The memory that it is counted to take there."""
    reason: str
    """The reason for that device, as it was when the engine was begun."""


class PlannedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change that was made, or in a dry run would have been."""

    at: int
    model: str
    before: int
    after: int
    why: str
    is_done: bool


class PlannerView(msgspec.Struct, frozen=True, kw_only=True):
    mode: str
    at: int
    models: list[PlannedModel] = []
    changes: list[PlannedChange] = []
    """The last ones, the newest first."""
    engines: list[PlacedEngine] = []
    """Those that run or start here; none where the settings name no devices."""

    def write(self, path: Path) -> None:
        """Raises: OSError."""
        fresh = path.with_name(f"{path.name}.new")
        fresh.write_bytes(msgspec.json.encode(self))
        fresh.replace(path)

    @staticmethod
    def read(path: Path) -> PlannerView | None:
        """None: no planner has decided anything here."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=PlannerView)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
