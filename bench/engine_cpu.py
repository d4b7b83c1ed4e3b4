"""Tokens per second of the engine against `transformers` static batching, on the same requests.

`python -m bench.engine_cpu [--quick]`: 64 requests with prompts of 32-512 and answers of 16-256
tokens, drawn with a fixed seed, on a model of the shape of SmolLM2-135M with random weights in
bfloat16. Both sides count the tokens that were asked for, greedy, EOS ignored.

The engine gets all requests at once. `transformers` gets them in order in left-padded batches; each
batch runs until its longest answer is done. It is run with several batch sizes and its best counts.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.record import record
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.protocol import EngineRequest, SamplingParams

SMOLLM2_135M: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
SEED = 2024
KV_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Workload:
    num_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    batch_sizes: tuple[int, ...]
    """Of the baseline."""


FULL = Workload(64, (32, 512), (16, 256), batch_sizes=(8, 16, 32, 64))
QUICK = Workload(12, (32, 160), (8, 48), batch_sizes=(4, 12))


@dataclass(frozen=True, slots=True)
class Request:
    prompt: list[int]
    num_output_tokens: int


def requests(workload: Workload) -> list[Request]:
    rng = random.Random(SEED)
    vocab = SMOLLM2_135M["vocab_size"]
    return [
        Request(
            [rng.randrange(vocab) for _ in range(rng.randint(*workload.prompt_tokens))],
            rng.randint(*workload.output_tokens),
        )
        for _ in range(workload.num_requests)
    ]


def warm_up() -> Request:
    """Shares no prefix with what is timed: it would be found in the cache."""
    rng = random.Random(SEED + 1)
    return Request([rng.randrange(SMOLLM2_135M["vocab_size"]) for _ in range(64)], 16)


def build_checkpoint(folder: Path) -> None:
    torch.manual_seed(SEED)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMOLLM2_135M))
    model.to(torch.bfloat16).save_pretrained(folder)


def run_engine(folder: Path, asked: Sequence[Request], budget: int) -> dict[str, Any]:
    core = EngineCore(
        EngineConfig(
            model=folder,
            device="cpu",
            dtype="bfloat16",
            kv_cache_bytes=KV_CACHE_BYTES,
            max_num_batched_tokens=budget,
        )
    )
    _drain(core, [warm_up()], "warm-up")
    start = time.perf_counter()
    num_tokens, num_steps = _drain(core, asked, "r")
    seconds = time.perf_counter() - start
    assert num_tokens == sum(request.num_output_tokens for request in asked)
    status = core.status()
    assert status.prefix_cache_hit_tokens == 0, "the baseline has no prefix cache to set against it"
    return {
        "seconds": round(seconds, 2),
        "tokens_per_s": round(num_tokens / seconds, 1),
        "steps": num_steps,
        "preemptions": status.num_preemptions,
        "max_num_batched_tokens": budget,
    }


def _drain(core: EngineCore, asked: Sequence[Request], name: str) -> tuple[int, int]:
    """Tokens generated and steps taken."""
    for i, request in enumerate(asked):
        sampling = SamplingParams(
            max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True
        )
        core.add(
            EngineRequest(
                request_id=f"{name}{i}", prompt_token_ids=request.prompt, sampling=sampling
            )
        )
    num_tokens = num_steps = 0
    while core.has_work():
        num_tokens += sum(len(output.token_ids) for output in core.step())
        num_steps += 1
    return num_tokens, num_steps


@torch.inference_mode()
def run_transformers(
    model: transformers.PreTrainedModel, asked: Sequence[Request], batch_size: int
) -> dict[str, Any]:
    num_tokens = sum(request.num_output_tokens for request in asked)
    start = time.perf_counter()
    for first in range(0, len(asked), batch_size):
        _generate_batch(model, asked[first : first + batch_size])
    seconds = time.perf_counter() - start
    return {
        "batch_size": batch_size,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(num_tokens / seconds, 1),
    }


def _generate_batch(model: transformers.PreTrainedModel, batch: Sequence[Request]) -> None:
    width = max(len(request.prompt) for request in batch)
    padding = [width - len(request.prompt) for request in batch]
    rows = [[0] * pad + request.prompt for pad, request in zip(padding, batch, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in padding]
    longest = max(request.num_output_tokens for request in batch)
    generated = model.generate(  # type: ignore[operator]
        torch.tensor(rows),
        attention_mask=torch.tensor(mask),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=longest, do_sample=False, pad_token_id=0
        ),
    )
    assert generated.shape == (len(batch), width + longest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="12 short requests; not recorded")
    parser.add_argument("--budget", type=int, default=512, help="max_num_batched_tokens")
    parser.add_argument("--engine-only", action="store_true", help="no baseline; not recorded")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    workload = QUICK if arguments.quick else FULL
    asked = requests(workload)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_checkpoint(folder)
        engine = run_engine(folder, asked, arguments.budget)
        print(f"engine        {engine['tokens_per_s']:8.1f} tokens/s  {engine}", flush=True)
        if arguments.engine_only:
            return
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None
    _generate_batch(model, asked[:1])
    baselines = []
    for batch_size in workload.batch_sizes:
        baselines.append(run_transformers(model, asked, batch_size))
        print(f"transformers  {baselines[-1]['tokens_per_s']:8.1f} tokens/s  {baselines[-1]}")
    best = max(baseline["tokens_per_s"] for baseline in baselines)
    ratio = round(engine["tokens_per_s"] / best, 2)
    print(f"ratio         {ratio:8.2f}  against the best of transformers")
    if not arguments.quick:
        result = {
            "model": "SmolLM2-135M shape, random weights, bfloat16",
            "workload": {
                "requests": len(asked),
                "prompt_tokens": sum(len(request.prompt) for request in asked),
                "output_tokens": sum(request.num_output_tokens for request in asked),
                "seed": SEED,
            },
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "engine": engine,
            "transformers_static_batching": baselines,
            "ratio": ratio,
        }
        print(f"recorded in {record('engine_cpu', result)}")


if __name__ == "__main__":
    main()
