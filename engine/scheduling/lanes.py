"""Decides what of the queue, of a step and of the blocks each lane may have, and how fast its
prompts go.

Knows neither sequences nor blocks but as numbers.

Each lane has a queue of its own length: who floods one gets nobody refused in another, nor another
tenant in the same. Two limits
keep room for the lanes above a lane, so that who comes there finds some at once:

  - it has at most `max_share` of the sequences that run at once. That holds also while nobody else
    is there: a sequence gives its place back only when it ends. Of the tokens of a step, of which
    the next step brings new ones, it has at most that share while any lane above has a request;
  - it starts nothing that would not leave `kv_headroom` of all blocks. That holds while no lane
    above is owed less than this one: once somebody waits there with a higher counter, it is this
    lane that is behind, and it may take the headroom, too. So both limits delay nobody for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from engine.config import EngineConfig
from engine.errors import EngineOverloaded
from engine.fairness import LANE_WEIGHTS, FairShare, QueueBound
from engine.protocol import Lane

RATE_S = 5.0
"""The rate of prompts is an average over about so long."""


class LaneLimits(msgspec.Struct, frozen=True):
    """max_share: above 0, at most 1; kv_headroom: at least 0, below 1."""

    max_share: float = 1.0
    kv_headroom: float = 0.0


NO_LIMITS = LaneLimits()


def limits_of(config: EngineConfig) -> dict[Lane, LaneLimits]:
    return {
        "agentic": LaneLimits(config.agentic_max_share, config.agentic_kv_headroom),
        "batch": LaneLimits(config.batch_max_share, config.batch_kv_headroom),
    }


def queues_of(config: EngineConfig) -> dict[Lane, int]:
    """How many requests may be queued in each lane."""
    return {
        "interactive": config.max_waiting,
        "agentic": config.agentic_max_waiting or config.max_waiting,
        "batch": config.batch_max_waiting or config.max_waiting,
    }


class Lanes:
    def __init__(
        self,
        share: FairShare,
        limits: Mapping[Lane, LaneLimits],
        *,
        max_waiting: Mapping[Lane, int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_blocks: int,
        max_blocks_per_seq: int,
    ) -> None:
        """Take the limits, but whatever they are, a lane may run one sequence, compute one token
        and, when nothing else runs, have the blocks of the longest sequence. limits: none where a
        lane has none.
        """
        self._share = share
        self.num_open: dict[Lane, int] = dict.fromkeys(LANE_WEIGHTS, 0)
        """Unfinished sequences."""
        self.queues = {lane: QueueBound(max_waiting[lane]) for lane in LANE_WEIGHTS}
        """The bound on requests none of whose choices ever ran."""
        order = tuple(LANE_WEIGHTS)
        self._above = {lane: order[:rank] for rank, lane in enumerate(order)}
        of = {lane: limits.get(lane, NO_LIMITS) for lane in LANE_WEIGHTS}
        spare = num_blocks - max_blocks_per_seq
        self.max_num_seqs = {
            lane: max(1, int(limit.max_share * max_num_seqs)) for lane, limit in of.items()
        }
        self._max_tokens = {
            lane: max(1, int(limit.max_share * max_num_batched_tokens))
            for lane, limit in of.items()
        }
        self._headroom = {
            lane: min(spare, math.ceil(limit.kv_headroom * num_blocks))
            for lane, limit in of.items()
        }
        self._is_limited = {lane: limit.max_share < 1 for lane, limit in of.items()}
        self.tokens_per_s: dict[Lane, float] = dict.fromkeys(LANE_WEIGHTS, 0.0)

    def refuse_what_has_no_place(self, lane: Lane, tenant: str) -> None:
        """EngineOverloaded when the lane's queue is full, or has no more room for the tenant."""
        queue = self.queues[lane]
        if not queue.has_room(tenant):
            whose = "" if queue.num_taken >= queue.most else " for its tenant"
            raise EngineOverloaded(
                f"{queue.num_taken} requests wait in lane {lane}, its queue is full{whose}"
            )

    def max_tokens(self, lane: Lane) -> int | None:
        """Return how many tokens of a step a lane may have, as it is now; None: all."""
        if self._is_limited[lane] and any(self.num_open[above] for above in self._above[lane]):
            return self._max_tokens[lane]
        return None

    def headroom(self, lane: Lane) -> int:
        """Blocks that a sequence of the lane has to leave when it starts now."""
        blocks = self._headroom[lane]
        if blocks == 0:
            return 0
        waits, counter_of = self._share.is_waiting, self._share.lane_counter
        mine = counter_of(lane)
        is_behind = any(waits(above) and counter_of(above) > mine for above in self._above[lane])
        return 0 if is_behind else blocks

    def observe(self, prompt_tokens: Mapping[Lane, int], step_s: float) -> None:
        """A step of `step_s` seconds, above 0, computed so much of lanes whose prompts waited."""
        weight = 1 - math.exp(-step_s / RATE_S)
        for lane, tokens in prompt_tokens.items():
            before, newest = self.tokens_per_s[lane], tokens / step_s
            self.tokens_per_s[lane] = before + weight * (newest - before) if before else newest
