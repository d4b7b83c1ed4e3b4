"""Measures what a whole engine does on the device: decodes, prompts, a mixture, the gap between
steps, and what its modes cost.

Knows no kernel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.gpu.ground import BATCHED_TOKENS, Ground
from engine.core.engine_core import EngineCore
from engine.protocol import EngineRequest, SamplingParams

CONTEXT = 1024
SETTLED_STEPS = 6
MIXED_WINDOW_S = 20.0
PREFILL_TIMES = 5
PROFILED_STEPS = 12


def add(core: EngineCore, name: str, prompt: list[int], max_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))


class Decoding:
    """A batch that decodes, about CONTEXT tokens each in the middle of what is measured."""

    def __init__(self, ground: Ground, core: EngineCore, batch: int, steps: int) -> None:
        self._core, self._ground, self._steps = core, ground, steps
        self._names = [f"decode-{time.monotonic_ns()}-{i}" for i in range(batch)]
        context = ground.place.pick(CONTEXT, 24)
        # The first ones decode while the others are prefilled.
        early = batch * context // ground.place.pick(BATCHED_TOKENS, 48) // 2
        length = max(1, context - early - SETTLED_STEPS - steps // 2)
        for name in self._names:
            add(core, name, ground.prompt(length), 4 * steps + 4 * early + 100)
        said = dict.fromkeys(self._names, 0)
        while min(said.values()) == 0:
            for output in core.step():
                said[output.request_id] += len(output.token_ids)
        for _ in range(SETTLED_STEPS):
            core.step()
        middle = sum(said.values()) / batch + SETTLED_STEPS + steps / 2
        self.context = length + middle

    def step_s(self) -> float:
        """Mean over the steps, host and device together."""
        self._core.step()
        self._ground.place.synchronize()
        count, began = 0, time.perf_counter()
        for _ in range(self._steps):
            count += sum(len(output.token_ids) for output in self._core.step())
        seconds = time.perf_counter() - began
        expected = len(self._names) * self._steps
        if count != expected:
            raise RuntimeError(f"{count} tokens in {self._steps} steps, not {expected}")
        return seconds / self._steps

    def end(self) -> None:
        for name in self._names:
            self._core.abort(name)
        while self._core.has_work():
            self._core.step()


def _decode_s(ground: Ground, core: EngineCore, batch: int) -> tuple[float, float]:
    """Seconds of a step, and the context in the middle."""
    steps = ground.place.pick(128 if batch <= 32 else 64, 2)
    decoding = Decoding(ground, core, batch, steps)
    try:
        return decoding.step_s(), decoding.context
    finally:
        decoding.end()


def decode(kind: str, batch: int) -> Callable[[Ground], dict[str, Any]]:
    def measure(ground: Ground) -> dict[str, Any]:
        own = ground.place.pick(batch, min(batch, 2))
        seconds, context = _decode_s(ground, ground.core(kind), own)
        return {"figure": seconds, "detail": {"context": context, "tokens_per_s": own / seconds}}

    return measure


def prefill(kind: str, tokens: int) -> Callable[[Ground], dict[str, Any]]:
    def measure(ground: Ground) -> dict[str, Any]:
        """From the request to its first token, of one that fits in a step."""
        seconds = _prefills_s(ground, ground.core(kind), ground.place.pick(tokens, 40))
        return {"figure": statistics.median(seconds), "detail": {"all_s": seconds}}

    return measure


def _prefills_s(ground: Ground, core: EngineCore, tokens: int) -> list[float]:
    seconds = []
    for _ in range(ground.place.pick(PREFILL_TIMES, 1) + 1):
        prompt = ground.prompt(tokens)
        began = time.perf_counter()
        add(core, f"prefill-{time.monotonic_ns()}", prompt, 1)
        while core.has_work():
            core.step()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]  # the first compiles


def mixed(ground: Ground) -> dict[str, Any]:
    """Prompts and answers of 1,000 tokens, a new request for each that ends. To begin in the middle
    of it, the first ones are given ages: part of their answer stands in their prompt."""
    place, core = ground.place, ground.core("fp8")
    batch, length = place.pick(512, 3), place.pick(1000, 8)
    for i in range(batch):
        age = length * i // batch
        add(core, f"aged-{i}", ground.prompt(length + age), length - age)
    waiting = {f"aged-{i}" for i in range(batch)}
    fresh, said, admitted = 0, 0, 0
    began: float | None = None
    window_s = place.pick(MIXED_WINDOW_S, 0.5)
    while began is None or time.perf_counter() - began < window_s:
        for output in core.step():
            waiting.discard(output.request_id)
            said += len(output.token_ids)
            if output.finished:
                add(core, f"fresh-{fresh}", ground.prompt(length), length)
                fresh, admitted = fresh + 1, admitted + 1
        if began is None and not waiting:
            began, said, admitted = time.perf_counter(), 0, 0
    seconds = time.perf_counter() - began
    status = core.status()
    for i in range(batch):
        core.abort(f"aged-{i}")
    for i in range(fresh):
        core.abort(f"fresh-{i}")
    while core.has_work():
        core.step()
    detail = {
        "running": status.num_running,
        "seconds": seconds,
        "prompt_tokens_per_s": admitted * length / seconds,
        "preemptions": status.num_preemptions,
    }
    return {"figure": said / seconds, "detail": detail}


def idle_between(busy: Sequence[tuple[float, float]], steps: int) -> tuple[float, float]:
    """(seconds idle between steps, seconds from the first work to the last) of a device that was
    `busy` from a to b for each pair while it did `steps` steps: a step's own launches leave small
    gaps, so that the steps - 1 widest ones are those between steps."""
    spans = sorted(busy)
    gaps, end = [], spans[0][0]
    for a, b in spans:
        gaps.append(max(0.0, a - end))
        end = max(end, b)
    widest = sorted(gaps, reverse=True)[: steps - 1]
    return sum(widest), end - spans[0][0]


def host_gap(ground: Ground) -> dict[str, Any]:
    """From the profiler's record of what the device did, batch 32."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    on_gpu = ground.place.device.type == "cuda"
    steps = ground.place.pick(PROFILED_STEPS, 2)
    decoding = Decoding(ground, ground.core("bf16"), ground.place.pick(32, 2), 2 * steps)
    core = ground.core("bf16")
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    try:
        with profile(activities=[activity]) as record:
            for _ in range(steps):
                core.step()
            ground.place.synchronize()
        wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
        busy = [
            (event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in record.events()
            if event.device_type == wanted
        ]
        # Unprofiled, so that what recording costs can be seen.
        step_s = decoding.step_s()
    finally:
        decoding.end()
    if not busy:
        raise RuntimeError("the profiler recorded nothing on the device")
    idle, whole = idle_between(busy, steps)
    detail = {"idle_s": idle, "span_s": whole, "steps": steps, "unprofiled_step_s": step_s}
    return {"figure": idle / whole, "detail": detail}


def _drain_s(ground: Ground, core: EngineCore) -> float:
    requests, prompt, output = ground.place.pick((128, 512, 64), (2, 9, 2))
    began = time.perf_counter()
    for i in range(requests):
        add(core, f"drain-{time.monotonic_ns()}-{i}", ground.prompt(prompt), output)
    while core.has_work():
        core.step()
    return time.perf_counter() - began


def prefix_cache(ground: Ground) -> dict[str, Any]:
    """128 requests of 512 + 64 tokens that share nothing, with the cache and without, in turns."""
    kinds = ("bf16", "bf16, no prefix cache")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    cores = {kind: ground.core(kind, keep=kinds) for kind in kinds}
    turns = ground.place.pick(4, 1)
    for turn in range(turns + 1):
        for kind in kinds:
            took = _drain_s(ground, cores[kind])
            if turn:  # the first compiles
                seconds[kind].append(took)
    hits = cores["bf16"].status().prefix_cache_hit_tokens
    with_cache, without = (min(seconds[kind]) for kind in kinds)
    detail = {"hit_tokens": hits, "with_s": seconds[kinds[0]], "without_s": seconds[kinds[1]]}
    return {"figure": with_cache / without - 1, "detail": detail}


def deterministic(ground: Ground) -> dict[str, Any]:
    """How much longer a decode of 32 takes, and a prompt of 8,192."""
    kinds = ("bf16", "bf16, deterministic")
    batch, tokens = ground.place.pick((32, 8192), (2, 40))
    decodes: dict[str, float] = {}
    prompts: dict[str, float] = {}
    for kind in kinds:
        core = ground.core(kind, keep=kinds)
        decodes[kind] = _decode_s(ground, core, batch)[0]
        prompts[kind] = statistics.median(_prefills_s(ground, core, tokens))
    detail = {
        "decode_s": decodes,
        "prefill_s": prompts,
        "prefill_cost": prompts[kinds[1]] / prompts[kinds[0]] - 1,
    }
    return {"figure": decodes[kinds[1]] / decodes[kinds[0]] - 1, "detail": detail}
