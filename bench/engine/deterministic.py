"""Measure what --deterministic costs: tokens per second with it and without, by turns, in one run.

`python -m bench.engine.deterministic [--quick] [--device cpu|cuda] [--dtype bfloat16]`: a model of
the shape of SmolLM2-135M with random weights. Prefill of one prompt of 512 tokens, then decodes of
1, 8 and 32 sequences behind prompts of 64; greedy, EOS ignored, no prefix shared. The median of the
turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.tools.record import record
from bench.tools.workload import SMOLLM2_135M
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineRequest, SamplingParams

CONFIG: dict[str, Any] = SMOLLM2_135M | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
PROMPT = 64
PREFILL = 512
KV_CACHE_BYTES = 1 << 30
MODES = {"default": False, "deterministic": True}


def start(folder: Path, deterministic: bool, arguments: argparse.Namespace) -> EngineCore:
    return EngineCore(
        EngineConfig(
            model=folder,
            load_format="dummy",
            device=arguments.device,
            dtype=arguments.dtype,
            kv_cache_bytes=KV_CACHE_BYTES,
            prefix_caching=False,
            deterministic=deterministic,
        )
    )


def rate(core: EngineCore, batch: int, answer: int) -> float:
    """Tokens per second; of a prompt where `batch` is 0, else of decodes, from the moment on when
    all prompts are through."""
    rng = random.Random(batch)
    prompt, answer = (PROMPT, answer) if batch else (PREFILL, 1)
    num_requests = max(1, batch)
    for i in range(num_requests):
        ids = [rng.randrange(CONFIG["vocab_size"]) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=ids, sampling=sampling))
    said, began = dict.fromkeys(map(str, range(num_requests)), 0), time.perf_counter()
    decoding_s, decoded = began, 0
    while core.has_work():
        for output in core.step():
            said[output.request_id] += len(output.token_ids)
        if decoded == 0 and min(said.values()) > 0:
            decoding_s, decoded = time.perf_counter(), sum(said.values())
    ended = time.perf_counter()
    assert sum(said.values()) == num_requests * answer
    if batch == 0:
        return PREFILL / (ended - began)
    return (sum(said.values()) - decoded) / (ended - decoding_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="What --deterministic costs.")
    parser.add_argument("--quick", action="store_true", help="few tokens; nothing is recorded")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    arguments = parser.parse_args()
    turns, answer = (1, 9) if arguments.quick else (5, 65)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        cores = {mode: start(folder, flag, arguments) for mode, flag in MODES.items()}
    table: dict[str, dict[str, float]] = {}
    for batch in (0, 1, 8, 32):
        rates: dict[str, list[float]] = {mode: [] for mode in MODES}
        for core in cores.values():
            rate(core, batch, 2)
        for _ in range(turns):
            for mode, core in cores.items():
                rates[mode].append(rate(core, batch, answer))
        row = {mode: round(statistics.median(found), 1) for mode, found in rates.items()}
        row["fraction"] = round(row["deterministic"] / row["default"], 3)
        what = f"decode {batch}" if batch else f"prefill {PREFILL}"
        table[what] = row
        print(f"  {what:<12} {'   '.join(f'{name} {value:.6g}' for name, value in row.items())}")
    if not arguments.quick:
        device, threads = next(iter(cores.values())).resolved.device, torch.get_num_threads()
        settings = {"device": device, "dtype": arguments.dtype, "threads": threads}
        print(record("deterministic", settings | {"tokens_per_s": table}))


if __name__ == "__main__":
    main()
