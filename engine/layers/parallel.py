"""The group of ranks that share one model's layers (Megatron-LM, arXiv:1909.08053).

Knows neither how ranks find each other nor what they compute. The default group has one rank and
moves nothing.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from engine.errors import ConfigError


class Shard(NamedTuple):
    """One of so many equal parts of a tensor along `dim`."""

    place: int = 0
    parts: int = 1
    dim: int = 0


WHOLE = Shard()


class ParallelGroup(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`; same shape, may be `x` itself."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` concatenated along the last axis, in order of rank."""


class SingleRank:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


SINGLE_RANK: ParallelGroup = SingleRank()


def own_shard(group: ParallelGroup, dim: int = 0) -> Shard:
    """Return this rank's part of what the ranks share along `dim`."""
    return Shard(group.rank, group.size, dim)


def share(total: int, group: ParallelGroup, what: str) -> int:
    """This rank's part of `total`; ConfigError when the ranks cannot share it evenly."""
    if total % group.size:
        raise ConfigError(f"{what} ({total}) cannot be shared evenly by {group.size} ranks")
    return total // group.size
