"""Counts the work that all workers of a home are asked for and send to replicas, for all of them.

What a replica said is as old as its last status; what was sent since is known here at once, whoever
sent it (`gateway.fleet.shared_sums`). What was asked of a model and refused, or came while none of
its engines ran, no engine knows of at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from engine.fairness import LANE_RANKS
from engine.protocol import Lane
from gateway.fleet.shared_sums import SharedSums

AskedColumn = Literal[
    "requests", "seconds", "squares", "tokens", "late", "batch_requests", "batch_seconds"
]
"""`seconds`: that prompts take an idle engine, what it has of them cached left out; `squares`: of
each of these; `tokens`: those that it has not cached. `late`: requests whose first token was
predicted later than it may be. The last two are of batches, which the others leave out."""


class SentWork(SharedSums[Lane]):
    """Counts what is sent to one replica. `path`: of the file; None: nobody else sends."""

    def __init__(self, path: Path | None = None) -> None:
        """The columns are in the order of the lanes' ranks."""
        super().__init__(tuple(LANE_RANKS), path)


class AskedWork(SharedSums[AskedColumn]):
    """Counts what is asked of one model. `path`: of the file; None: nobody else is asked. `adds`:
    False: for the planner, which reads."""

    def __init__(self, path: Path | None = None, *, adds: bool = True) -> None:
        super().__init__(get_args(AskedColumn), path, adds=adds)

    def by_column(self) -> dict[AskedColumn, float]:
        """Return what was ever counted, by column."""
        return dict(zip(self.columns, self.totals(), strict=True))

    def note(
        self, lane: Lane, prompt_s: float = 0.0, *, tokens: int = 0, is_late: bool = False
    ) -> None:
        """Count one request. `prompt_s`: 0: nobody knows. `tokens`: of its prompt, not cached."""
        if lane == "batch":
            self.add("batch_requests", 1)
            self.add("batch_seconds", prompt_s)
            return
        self.add("requests", 1)
        self.add("seconds", prompt_s)
        self.add("squares", prompt_s * prompt_s)
        self.add("tokens", tokens)
        if is_late:
            self.add("late", 1)
