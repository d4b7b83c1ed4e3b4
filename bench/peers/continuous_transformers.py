"""`transformers`' own continuous batching, as it comes for a processor."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.tools.workload import Request

NAME = "transformers' continuous batching"
NUM_BLOCKS = 160
"""Blocks of 256 tokens: enough for the whole workload at once, and no more of the host's memory."""
MAX_BATCH_TOKENS = 512
DEADLINE_S = 1800.0
"""For one workload."""


def installed() -> bool:
    return hasattr(transformers, "ContinuousBatchingConfig")


class Peer:
    def __init__(self, folder: Path, dtype: str) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    def run(self, requests: Sequence[Request]) -> None:
        """Its thread lives as long as the workload: idle, it would take from the other engines."""
        longest = max(request.num_output_tokens for request in requests)
        manager = self._model.continuous_batching_context_manager(
            generation_config=transformers.GenerationConfig(
                max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                num_blocks=NUM_BLOCKS, max_batch_tokens=MAX_BATCH_TOKENS
            ),
            block=True,
            timeout=5,
        )
        with manager as batching:
            for number, request in enumerate(requests):
                batching.add_request(
                    request.prompt,
                    request_id=str(number),
                    max_new_tokens=request.num_output_tokens,
                )
            said = _wait(batching, len(requests))
        assert said == sum(request.num_output_tokens for request in requests)


def _wait(batching: Any, count: int) -> int:
    """Tokens generated once `count` requests have ended."""
    said = ended = 0
    deadline = time.perf_counter() + DEADLINE_S
    while ended < count:
        result = batching.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error:
                raise RuntimeError(f"transformers: {result.error}")
            said += len(result.generated_tokens)
            ended += 1
        elif time.perf_counter() > deadline or (result is None and not batching.is_running()):
            raise RuntimeError(f"transformers ended {ended} of {count} requests")
    return said
