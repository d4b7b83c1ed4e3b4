"""Says how a planner has engines of this home started and ended: what it wants done, not how."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

PutInForce = Callable[[], Awaitable[None]]
"""Lets workers ask an engine that is ready. Raises: ScalingError, and the engine ends then."""


class ScalingError(Exception):
    """An error of a change that was not made: one line that says why. `is_outdated`: because the
    settings have become others meanwhile; what they want now may be tried at once."""

    def __init__(self, message: str, *, is_outdated: bool = False) -> None:
        super().__init__(message)
        self.is_outdated = is_outdated


class EngineScaler(Protocol):
    """Starts and ends engines of models with a range of them. Any number of starts may be under way
    at a time, beside all else."""

    async def start(self, model: str) -> PutInForce:
        """Start one more engine of a model, and return once it is ready. Broken off, nothing is
        left of it. Raises: ScalingError, and nothing is left of it."""

    async def shrink(self, model: str, number: int, wakes_in_s: float | None) -> None:
        """Have no more than so many engines of a model; the others end what they run. `wakes_in_s`:
        how long a start takes, for those that ask while there is none. Raises: ScalingError, and
        all is as it was."""
