"""`transformers` in left-padded batches; each runs until its longest answer is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from bench.tools.workload import Request

NAME = "transformers"
BATCH_SIZES = (32, 64)
"""For a workload of many requests, the best counts."""


def installed() -> bool:
    return True


class Peer:
    def __init__(self, folder: Path, dtype: str) -> None:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        )
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], batch_size: int = 32) -> None:
        for first in range(0, len(requests), batch_size):
            self._generate(requests[first : first + batch_size])

    def _generate(self, batch: Sequence[Request]) -> None:
        width = max(len(request.prompt) for request in batch)
        padding = [width - len(request.prompt) for request in batch]
        rows = [[0] * pad + request.prompt for pad, request in zip(padding, batch, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        longest = max(request.num_output_tokens for request in batch)
        generated = self._model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=longest, do_sample=False, pad_token_id=0
            ),
        )
        assert generated.shape == (len(batch), width + longest)
