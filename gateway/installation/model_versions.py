"""Describes which version of each model runs in a home, and how far one is that is to replace it:
what each `tollgate up` reports of itself, and the console shows to operators as rollouts.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Literal

import msgspec

from gateway.settings.models import ModelConfig
from gateway.settings.sealed_keys import origin_of

VERSION_DIGITS = 10
COMMIT_DIGITS = 12
WEIGHTS_CHARS = len("sha256:") + 12
MAX_PROBLEM_CHARS = 500
State = Literal["starting", "warming", "ready", "serving", "restarting", "draining", "failed"]
"""`ready`: its engine listens, and the workers are still to take it up. `restarting`: it left, and
is started again. `draining`: it was replaced, and ends what it began. `failed`: it did not start,
and the version before serves."""
UNDER_WAY = ("starting", "warming", "ready")


class ModelVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a model in one home."""

    model: str
    version: str
    """The first digits of a digest of its settings: the same in every home that has the same."""
    weights: str = ""
    """The folder, or the repository and its commit; empty: they are elsewhere."""
    place: str
    """The engine's process, its address, or the origins of upstreams."""
    state: str
    """One of `State`; of a home of another release perhaps none of ours."""
    since: int
    """Unix seconds at which it came into this state."""
    problem: str = ""


class RunningModels(msgspec.Struct, frozen=True, kw_only=True):
    """The release and the models that one home runs. `release`: of Tollgate; empty: it is an older
    one, which does not say it."""

    release: str = ""
    models: tuple[ModelVersion, ...] = ()


def running_release() -> str:
    return version("tollgate")


def version_of(model: ModelConfig) -> str:
    """Name the version of a model by its settings, whichever processes it has and however many:
    other settings are another version."""
    path = model.path if model.source is None else None  # its version names the files everywhere
    bare = msgspec.structs.replace(
        model,
        path=path,
        engines=(),
        joined=(),
        prefill=(),
        replica_range=None,
        joined_range=None,
        kubernetes=None,
        is_asleep=False,
        wakes_in_s=None,
        starts_engine=False,
        shares_memory=False,
        evaluations=(),
    )
    written = msgspec.json.encode(bare, enc_hook=str, order="deterministic")
    return hashlib.sha256(written).hexdigest()[:VERSION_DIGITS]


def weights_of(model: ModelConfig) -> str:
    """Name the weights of a model: those of a hub are at a commit, which is their folder's name."""
    if model.source is not None:
        return f"{model.source} {(model.version or '')[:WEIGHTS_CHARS]}".strip()
    if model.path is None:
        return model.repository or ""
    if model.repository is not None:
        return f"{model.repository}@{model.path.name[:COMMIT_DIGITS]}"
    return str(model.path)


class VersionHistory:
    """Remembers since when models that others run have their versions here: upstreams, and engines
    that nobody here starts. `clock`: Unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._since: dict[tuple[str, str], int] = {}

    def of(self, models: Iterable[ModelConfig]) -> list[ModelVersion]:
        """Return the versions of models whose settings are in force now."""
        named = {(each.name, version_of(each)): each for each in models}
        now = int(self._clock())
        self._since = {name: self._since.get(name, now) for name in named}
        return [
            ModelVersion(
                model=model.name,
                version=digest,
                weights=weights_of(model),
                place=_place_of(model),
                state="serving",
                since=self._since[model.name, digest],
            )
            for (_, digest), model in named.items()
        ]


def _place_of(model: ModelConfig) -> str:
    if model.engines:
        return ", ".join(model.engines)
    return ", ".join(dict.fromkeys(origin_of(each.upstream) for each in model.replicas))
