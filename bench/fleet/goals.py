"""Prints goals of the fleet as met or not."""

from __future__ import annotations

import msgspec


class FleetGoal(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """As the list of goals calls it: `G1`."""
    text: str
    reached: float
    wanted: float
    at_most: bool = False
    """A limit, where others are a floor."""

    @property
    def is_met(self) -> bool:
        return self.reached <= self.wanted if self.at_most else self.reached >= self.wanted

    def line(self) -> str:
        sign, said = "<=" if self.at_most else ">=", "met" if self.is_met else "NOT MET"
        return f"{self.name}  {self.text}: {self.reached:.3f} {sign} {self.wanted:g}: {said}"


def tell(goals: list[FleetGoal]) -> int:
    """Print them; return the exit status of the command."""
    for goal in goals:
        print(goal.line())
    return int(not all(goal.is_met for goal in goals))
