"""A tiny model served by either runner, and what its requests say; for the tests of the runner."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton  # noqa: F401 (its interpreter is on for those who have imported it)

from engine.config import BLOCK_SIZE, Pooling
from engine.core.stepper import Stepper
from engine.fairness import LANE_WEIGHTS
from engine.kernels.backend import uses_triton
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_cache import PrefixCache
from engine.models.decoder import Decoder
from engine.protocol import EngineRequest, SamplingParams
from engine.runner.device.cuda_graphs import GraphBackend
from engine.runner.device.device_runner import DeviceRunner, StepLimits
from engine.runner.memory.kv_cache import allocate_kv_cache, attention_shape
from engine.runner.model_runner import ModelRunner
from engine.runner.speculative.guesser import Guesser
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Constraint
from engine.weights.loader import load_model

VOCAB = 61
LIMITS = StepLimits(max_num_tokens=20, max_num_seqs=6, max_model_len=96)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MIXTURE = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 20,
}

Said = dict[str, list[tuple[list[int], list[Any]]]]


def load(folder: Path, device: torch.device, **changes: Any) -> Decoder:
    """Random weights; every layer is there, so one of each is enough."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return load_model(folder, dtype="float32", device=device, load_format="dummy", seed=3)


def runner_of(
    model: Decoder,
    backend: GraphBackend | None = None,
    *,
    num_blocks: int = 24,
    limits: StepLimits = LIMITS,
) -> ModelRunner | DeviceRunner:
    """The device's with graphs, or, without a backend for them, the plain one. The cache starts as
    poison."""
    assert uses_triton(model.device)
    shape = attention_shape(model, BLOCK_SIZE)
    cache = allocate_kv_cache(shape, model.config.num_layers, num_blocks)
    for layer in cache:
        layer.k.fill_(torch.nan)
        layer.v.fill_(torch.nan)
    nothing = frozenset[int]()
    if backend is None:
        return ModelRunner(model, cache, shape, eos_token_ids=nothing)
    runner = DeviceRunner(model, cache, shape, eos_token_ids=nothing, limits=limits)
    runner.capture(backend)
    return runner


def stepper_of(
    runner: ModelRunner,
    sliding_window: int | None,
    *,
    ahead: bool,
    penalties_ahead: bool,
    guesser: Guesser | None,
    pooling: Pooling = "last",
) -> tuple[Stepper, Scheduler]:
    steps = 2 if ahead else 1
    scheduler = Scheduler(
        cache=PrefixCache(
            BlockPool(runner._cache[0].k.shape[0]), BLOCK_SIZE, sliding_window=sliding_window
        ),
        max_num_batched_tokens=LIMITS.max_num_tokens,
        max_num_seqs=LIMITS.max_num_seqs,
        max_waiting=dict.fromkeys(LANE_WEIGHTS, 100),
        max_model_len=LIMITS.max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=(),
        max_steps_in_flight=steps,
        penalties_ahead=penalties_ahead,
        pooling=pooling,
    )
    return Stepper(scheduler, runner, max_steps_in_flight=steps, guesser=guesser), scheduler


def run(
    runner: ModelRunner,
    model: Decoder,
    requests: Sequence[tuple[int, EngineRequest]],
    *,
    ahead: bool = False,
    penalties_ahead: bool = False,
    guesser: Guesser | None = None,
    before_step: Callable[[], None] = lambda: None,
    constraints: Mapping[str, Constraint] | None = None,
) -> Said:
    """requests: (the step before which it comes, and the request). constraints: by request id. What
    each of them said."""
    stepper, scheduler = stepper_of(
        runner,
        model.config.sliding_window,
        ahead=ahead,
        penalties_ahead=penalties_ahead,
        guesser=guesser,
    )
    waiting = sorted(requests, key=lambda pair: pair[0])
    said: Said = {request.request_id: [] for _, request in requests}
    number = 0
    while waiting or stepper.has_work():
        while waiting and waiting[0][0] <= number:
            request = waiting.pop(0)[1]
            scheduler.add(request, (constraints or {}).get(request.request_id))
        before_step()
        for output in stepper.step():
            assert output.error_code is None, output.error_code
            said[output.request_id].append((output.token_ids, output.logprobs or []))
        number += 1
    scheduler.check_integrity()
    return said


def ask(number: int, prompt: Sequence[int], adapter: str = "", **sampling: Any) -> EngineRequest:
    params = SamplingParams(**({"max_tokens": 4, "seed": number, "ignore_eos": True} | sampling))
    return EngineRequest(
        request_id=str(number), prompt_token_ids=list(prompt), sampling=params, adapter=adapter
    )


def tokens(said: Said) -> dict[str, list[int]]:
    return {key: [t for ids, _ in parts for t in ids] for key, parts in said.items()}
