"""Estimates how much of a prompt each engine of a model has cached.

The index (`gateway.fleet.kv_index`) says what they have told. What this worker itself sent lately
counts, too: an engine tells of a prompt when it is computed. Where nobody writes the index any more
all that was sent counts beside what was left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from engine.prefix_digests import SPAN_BLOCKS
from engine.protocol import ReplicaStatus
from gateway.fleet.engine.job import EngineJob
from gateway.fleet.engine.prefix_memory import PrefixMemory
from gateway.fleet.kv_index import KvIndex
from gateway.fleet.replica import PreparedRequest

ON_ITS_WAY_S = 10.0
"""Prompts sent since then may be about to be cached; older ones the index has, or they are gone."""
SILENT_S = 5.0
"""A writer of the index that was not heard of for so long is gone."""


class CachingReplica(Protocol):
    """A replica whose prefix cache is known from afar."""

    @property
    def sent(self) -> PrefixMemory: ...

    @property
    def index(self) -> KvIndex | None: ...

    @property
    def status(self) -> ReplicaStatus | None:
        """None: it is away."""


def cached_tokens(prepared: PreparedRequest, replicas: Sequence[CachingReplica]) -> list[int]:
    """Return how many tokens of a prompt's front, in whole spans, each of a model's replicas
    probably has; 0 of those that are away. The last token is always computed."""
    job, index = prepared.payload, replicas[0].index
    assert isinstance(job, EngineJob)
    keys, most = job.span_keys, len(job.request.prompt_token_ids) - 1
    if not keys:
        return [0] * len(replicas)
    statuses = [each.status for each in replicas]
    told = next((each for each in statuses if each is not None), None)
    if told is None:
        return [0] * len(replicas)
    engine_ids = tuple(["" if each is None else each.engine_id for each in statuses])
    held, within_s = [0] * len(replicas), math.inf
    if index is not None:
        held = index.spans_held(keys, engine_ids, sliding_window=told.sliding_window)
        within_s = ON_ITS_WAY_S if index.silent_s < SILENT_S else math.inf
    span_tokens, found = SPAN_BLOCKS * told.block_size, []
    for replica, engine_id, num_spans in zip(replicas, engine_ids, held, strict=True):
        if not engine_id:
            found.append(0)
            continue
        sent = replica.sent
        if sent.num_spans and num_spans < len(keys):
            num_spans = sent.spans_sent(keys, num_spans, engine_id=engine_id, within_s=within_s)
        found.append(min(most, num_spans * span_tokens))
    return found
