"""The same requests through our engine and through `transformers`' continuous batching, one after
the other on the same device.

Both are given all requests at once, greedy, no EOS, the same weights' shape in bfloat16.
"""

from __future__ import annotations

import logging
import random
import time
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from bench.gpu.findings import Lacking
from bench.gpu.ground import Ground
from bench.gpu.place import Place
from bench.gpu.rows.engine_rows import add

WHOLE = 2000
SCALED = 400
WHOLE_S = 200.0
"""For all of them on both sides; with less than that left the replay is scaled down. Alone
(`--only replay`) it has more by default."""
PEER_DEADLINE_S = 90.0
"""Requests that ended by then count."""


class TracedRequest(NamedTuple):
    prompt: list[int]
    num_output_tokens: int


def trace(place: Place, vocab: int, count: int) -> list[TracedRequest]:
    """Chats, documents and long answers in one queue; the same for every count's beginning."""
    rng = random.Random(2024)
    asked = []
    for _ in range(count):
        kind = rng.random()
        prompt = rng.randint(32, 512) if kind < 0.7 else rng.randint(512, 2048)
        output = rng.randint(16, 256) if kind < 0.85 else rng.randint(256, 512)
        if place.tiny:
            prompt, output = prompt % 20 + 2, output % 3 + 1
        asked.append(TracedRequest([rng.randrange(3, vocab) for _ in range(prompt)], output))
    return asked


def replay(ground: Ground) -> dict[str, Any]:
    """Raises Lacking."""
    if find_spec("transformers") is None:
        raise Lacking("transformers is not installed")
    place = ground.place
    count = WHOLE if ground.left_s >= WHOLE_S else SCALED
    asked = trace(place, ground.shape.vocab_size, place.pick(count, 3))
    ours = _ours(ground, asked)
    ground.drop()
    theirs = _theirs(ground, asked)
    remark = f"{len(asked):,} requests"
    if len(asked) < WHOLE:
        remark = f"scaled down: {len(asked)} of {WHOLE:,} requests"
    if theirs["ended"] < len(asked):
        remark += f"; transformers ended {theirs['ended']} in time, the others count for nothing"
    detail = {"requests": len(asked), "ours": ours, "transformers": theirs, "remark": remark}
    return {"figure": ours["tokens_per_s"] / theirs["tokens_per_s"], "detail": detail}


def _ours(ground: Ground, asked: list[TracedRequest]) -> dict[str, Any]:
    core = ground.core("bf16")
    add(core, "warm-up", ground.prompt(8), 4)
    while core.has_work():
        core.step()
    began, said, steps, left = time.perf_counter(), 0, 0, list(enumerate(asked))[::-1]
    while left or core.has_work():
        # No more than the engine's queue takes.
        while left and core.status().num_waiting < 512:
            i, request = left.pop()
            add(core, f"replay-{i}", request.prompt, request.num_output_tokens)
        said += sum(len(output.token_ids) for output in core.step())
        steps += 1
    seconds = time.perf_counter() - began
    wanted = sum(request.num_output_tokens for request in asked)
    if said != wanted:
        raise RuntimeError(f"our engine said {said} tokens of {wanted}")
    return {"seconds": seconds, "tokens_per_s": said / seconds, "steps": steps}


def _theirs(ground: Ground, asked: list[TracedRequest]) -> dict[str, Any]:
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    model = _model(ground)
    generation = transformers.GenerationConfig(
        max_new_tokens=max(request.num_output_tokens for request in asked),
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    # On a GPU its own choice; on a CPU that would be most of the host's memory.
    few = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    manager = model.continuous_batching_context_manager(
        generation_config=generation,
        continuous_batching_config=ground.place.pick(None, few),
        block=True,
        timeout=5,
    )
    with manager as batching:
        batching.add_request(asked[0].prompt, request_id="warm-up", max_new_tokens=2)
        _until(batching, 1, time.perf_counter() + PEER_DEADLINE_S)
        began = time.perf_counter()
        for i, request in enumerate(asked):
            batching.add_request(
                request.prompt, request_id=f"r{i}", max_new_tokens=request.num_output_tokens
            )
        ended = _until(batching, len(asked), began + PEER_DEADLINE_S)
        seconds = time.perf_counter() - began
    said = sum(len(result.generated_tokens) for result in ended)
    if not said:
        raise RuntimeError(f"transformers ended no request within {seconds:.0f} s")
    return {"seconds": seconds, "tokens_per_s": said / seconds, "ended": len(ended)}


def _model(ground: Ground) -> Any:
    import transformers

    fields = {k: v for k, v in ground.config.items() if k not in ("architectures", "model_type")}
    fields |= {"torch_dtype": None}
    fields = {key: value for key, value in fields.items() if value is not None}
    dtype = ground.place.pick(torch.bfloat16, torch.float32)
    with torch.device(ground.place.device):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**fields), dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval()


def _until(batching: Any, count: int, deadline: float) -> list[Any]:
    ended: list[Any] = []
    while len(ended) < count and time.perf_counter() < deadline:
        result = batching.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error:
                raise RuntimeError(f"transformers: {result.error}")
            ended.append(result)
        elif result is None and not batching.is_running():
            raise RuntimeError("transformers' generation thread ended; see the log")
    return ended
