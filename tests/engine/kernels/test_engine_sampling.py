"""The engine samples on its kernels what it samples without them: filters, penalties, bias, minimum
length and log-probabilities at once, over a model with norms on queries and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.kernels import backend
from engine.protocol import EngineRequest, SamplingParams, TokenLogprob
from tests.engine import checkpoints

PROMPTS = [[3 + (7 * i) % 90 for i in range(20)], [11, 5, 9]]
PARAMS: list[dict[str, Any]] = [
    {"seed": 3, "top_p": 0.9, "logprobs": 2, "repetition_penalty": 1.2},
    {"seed": 5, "temperature": 0.8, "top_k": 20, "logit_bias": {5: 1.0}, "min_tokens": 3},
]
NUM_TOKENS = 4

Said = list[tuple[int, list[TokenLogprob]]]


def generate(folder: Path, device: torch.device) -> list[Said]:
    config = EngineConfig(
        model=folder,
        device="cuda" if device.type == "cuda" else "cpu",
        dtype="float32",
        num_blocks=32,
        max_num_batched_tokens=24,
    )
    core = EngineCore(config)
    said: dict[str, Said] = {}
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **params)
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
        said[str(i)] = []
    while core.has_work():
        for output in core.step():
            lists = output.logprobs or []
            found = [[each.chosen, *each.top] for each in lists] or [[]] * len(output.token_ids)
            said[output.request_id] += zip(output.token_ids, found, strict=True)
    return list(said.values())


def test_the_same_draws(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    folder = checkpoints.save("qwen3", tmp_path)
    assert backend.uses_triton(device)
    on_kernels = generate(folder, device)
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    without = generate(folder, torch.device("cpu"))
    for ours, theirs in zip(on_kernels, without, strict=True):
        assert [token_id for token_id, _ in ours] == [token_id for token_id, _ in theirs]
        assert len(ours) == NUM_TOKENS
        for (_, found), (_, wanted) in zip(ours, theirs, strict=True):
            assert [t.token_id for t in found] == [t.token_id for t in wanted]
            close = pytest.approx([t.logprob for t in wanted], abs=1e-4)
            assert [t.logprob for t in found] == close
    assert all(len(found) == 3 for _, found in on_kernels[0])
    assert not any(found for _, found in on_kernels[1])
