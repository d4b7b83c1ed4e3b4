"""Reads how many engines a model has: those that are started for it, those that may join, within
which range, and of which role.
"""

from __future__ import annotations

from gateway.settings.engine_counts import MAX_ENGINES, JoinedRoles
from gateway.settings.file import SettingsError, Strict, WrittenModel


class ReplicaRange(Strict, frozen=True, kw_only=True):
    """The bounds within which the planner decides how many engines a model has."""

    least: int
    """0: it may have none while nothing is asked of it."""
    most: int

    def __str__(self) -> str:
        return f"{self.least}..{self.most}"

    @staticmethod
    def read(text: str, at: str) -> ReplicaRange:
        """`text`: as `RANGE_PATTERN` has it; `at`: its key. Raises: SettingsError."""
        least, _, most = text.partition("..")
        found = ReplicaRange(least=int(least), most=int(most))
        if not found.least <= found.most:
            raise SettingsError(f"{at}: {text!r} has its least number behind its largest")
        if not 1 <= found.most <= MAX_ENGINES:
            raise SettingsError(f"{at}: {text!r}: the largest number is from 1 to {MAX_ENGINES}")
        return found


def started_engines(model: WrittenModel, at: str) -> tuple[ReplicaRange | None, int]:
    """Return the range of a model's engines, if it has one, and how many it begins with: of a range
    one at least, which shows that it loads and how long that takes. Raises: SettingsError."""
    written = model.replicas
    if isinstance(written, str):
        if model.joined:
            raise SettingsError(
                f"{at}.replicas: a range only without `joined`: the planner counts no engine that"
                " joins"
            )
        found = ReplicaRange.read(written, f"{at}.replicas")
        return found, max(1, found.least)
    if written == 0 and not model.joined:
        raise SettingsError(
            f"{at}.replicas: 0 only where engines may join, by `joined`; '0..1' ends the only"
            " engine while nothing is asked of it"
        )
    if has_roles(model):
        return None, (model.prefill or 0) + (model.decode or 0)
    return None, 1 if written is None else written


def joined_engines(model: WrittenModel, at: str) -> tuple[ReplicaRange | None, int]:
    """Return the range of the engines that join a model, if it has one, and how many may. Raises:
    SettingsError."""
    written = model.joined
    if not isinstance(written, str):
        if model.kubernetes is not None:
            raise SettingsError(f"{at}.kubernetes: only beside a range, such as joined = '1..4'")
        if isinstance(written, JoinedRoles):
            return None, (written.prefill or 0) + (written.decode or 0)
        return None, written or 0
    found = ReplicaRange.read(written, f"{at}.joined")
    if found.least == 0:
        raise SettingsError(f"{at}.joined: {written!r}: the least number is 1: no pod is woken")
    if model.kubernetes is None:
        raise SettingsError(f"{at}.joined: a range only beside [model.kubernetes], which is scaled")
    if model.replicas != 0:
        raise SettingsError(f"{at}.replicas: wants 0 beside a range of engines that join")
    if model.ray is not None:
        raise SettingsError(f"{at}.ray: not beside [model.kubernetes], which runs all of them")
    return found, found.most


def has_roles(model: WrittenModel) -> bool:
    """Tell whether some of its engines compute prompts for the others."""
    written = (model.prefill, model.decode)
    return isinstance(model.joined, JoinedRoles) or any(each is not None for each in written)


def check_roles(model: WrittenModel, at: str) -> None:
    """Refuse roles of which one has no engine: prompts that nobody computes, or nobody goes on
    with. Raises: SettingsError."""
    if not has_roles(model):
        return
    if model.joined is not None and not isinstance(model.joined, JoinedRoles):
        raise SettingsError(
            f"{at}.joined: beside prefill and decode it says how many of either role, such as"
            " joined = { decode = 2 }"
        )
    if model.replicas is not None:
        raise SettingsError(f"{at}.replicas: not beside roles, which say how many engines start")
    joined = model.joined or JoinedRoles()
    there = {
        "prefill": (model.prefill, joined.prefill),
        "decode": (model.decode, joined.decode),
    }
    named = {role for role, numbers in there.items() if any(numbers)}
    if not named:
        raise SettingsError(f"{at}.joined: wants prefill or decode: how many of either may join")
    for role, lacks, why in (
        ("prefill", "decode", "nobody goes on with what it computes"),
        ("decode", "prefill", "nobody computes prompts for it"),
    ):
        if role in named and lacks not in named:
            key = role if getattr(model, role) is not None else f"joined.{role}"
            raise SettingsError(f"{at}.{key}: {why}: wants {lacks} beside it, or joined.{lacks}")
