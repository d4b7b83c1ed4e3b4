"""Rounds of a tool loop on a real engine: each computes what is new in it, and at most a block."""

from __future__ import annotations

import random
from pathlib import Path

from engine.config import BLOCK_SIZE, EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineRequest, SamplingParams

PENNY = Path(__file__).resolve().parents[2] / "models" / "penny"


def test_a_round_computes_what_stands_behind_the_answer_before() -> None:
    core = EngineCore(
        EngineConfig(model=PENNY, device="cpu", dtype="float32", num_blocks=200, max_model_len=1024)
    )
    draw = random.Random(7)
    prompt = [draw.randrange(10, 4000) for _ in range(150)]
    num_new = len(prompt)
    for number in range(8):
        request = EngineRequest(
            request_id=f"round-{number}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=draw.randrange(1, 40), ignore_eos=True, seed=number),
        )
        core.add(request)
        answer: list[int] = []
        while core.has_work():
            for output in core.step():
                answer += output.token_ids
                usage = output.usage
        computed = usage.prompt_tokens - usage.cached_tokens
        assert usage.prompt_tokens == len(prompt)
        assert min(num_new, len(prompt)) <= computed <= num_new + BLOCK_SIZE, number
        result = [draw.randrange(10, 4000) for _ in range(draw.randrange(1, 60))]
        num_new, prompt = len(result), [*prompt, *answer, *result]
