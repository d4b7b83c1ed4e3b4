"""Holds what the scheduler's tests share: a scheduler of small blocks, requests, and a model that
says one token to everybody.
"""

from __future__ import annotations

from typing import Any

from engine.fairness import LANE_WEIGHTS
from engine.kv_cache.block_leases import CacheLeases
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_cache import PrefixCache
from engine.protocol import EngineOutput, EngineRequest, Lane, SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_plan import SchedulerOutput
from engine.sequence import Sequence

EOS = 7
VOCAB = 100


class Clock:
    """Seconds that pass only when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    num_blocks: int = 64,
    *,
    window: int | None = None,
    enabled: bool = True,
    block_size: int = 4,
    leases: CacheLeases | None = None,
    **changes: Any,
) -> Scheduler:
    cache = PrefixCache(
        BlockPool(num_blocks),
        block_size,
        enabled=enabled,
        sliding_window=window,
        leases=leases,
    )
    arguments: dict[str, Any] = {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
        "max_waiting": 100,
        "max_model_len": 64,
        "vocab_size": VOCAB,
        "eos_token_ids": (EOS,),
        "clock": Clock(),
    }
    arguments |= changes
    if isinstance(arguments["max_waiting"], int):
        arguments["max_waiting"] = dict.fromkeys(LANE_WEIGHTS, arguments["max_waiting"])
    return Scheduler(cache=cache, **arguments)


def request(
    request_id: str,
    prompt: list[int] | int,
    *,
    n: int = 1,
    salt: str = "",
    turn: dict[str, Any] | None = None,
    **sampling: Any,
) -> EngineRequest:
    """A prompt given as a length is made of one token that no other request_id uses. turn: lane,
    tenant, weight, deadline and breakpoints."""
    if isinstance(prompt, int):
        prompt = [20 + sum(request_id.encode()) % 80] * prompt
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**({"max_tokens": 8} | sampling)),
        n=n,
        cache_salt=salt,
        **(turn or {}),
    )


def add(
    scheduler: Scheduler,
    name: str,
    prompt: int,
    lane: Lane = "interactive",
    tenant: str = "",
    *,
    weight: float = 1.0,
    priority: int = 0,
    deadline_s: float | None = None,
    **sampling: Any,
) -> None:
    turn = {"lane": lane, "tenant": tenant, "weight": weight, "deadline_s": deadline_s}
    turn["priority"] = priority
    scheduler.add(request(name, prompt, turn=turn, **sampling))


def embedding(
    request_id: str, prompt: list[int], salt: str = "", turn: dict[str, Any] | None = None
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        embed=True,
        cache_salt=salt,
        **(turn or {}),
    )


def execute(scheduler: Scheduler, output: SchedulerOutput, token: int = 1) -> list[EngineOutput]:
    """A model that says `token` to everybody, and embeds nothing as a vector of no numbers."""
    sampled = {s.key: [(token, None)] for s in output.scheduled if s.samples}
    embedded = {s.key: b"" for s in output.scheduled if s.embeds}
    outputs = scheduler.update(output, sampled, embedded)
    scheduler.check_integrity()
    return outputs


def step(scheduler: Scheduler, token: int = 1) -> list[EngineOutput]:
    return execute(scheduler, scheduler.schedule(), token)


def drain(scheduler: Scheduler, token: int = 1, max_steps: int = 1000) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    for _ in range(max_steps):
        if not scheduler.has_unfinished():
            assert scheduler.num_free_blocks == scheduler.cache.pool.num_blocks
            return outputs
        outputs += step(scheduler, token)
    raise AssertionError(f"not drained in {max_steps} steps")


def plan(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(s.seq.request_id, s.start, s.num_new_tokens) for s in output.scheduled]


def sequence_of(scheduler: Scheduler, request_id: str, index: int = 0) -> Sequence:
    return scheduler._requests[request_id].sequences[index]
