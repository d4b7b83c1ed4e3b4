"""The smallest limits that may be asked for are no smaller than what a start does by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.kernels import backend
from engine.protocol import EngineRequest, SamplingParams
from tests.budget import NIGHT
from tests.engine import checkpoints

pytest.importorskip("triton")  # imported, the interpreter is seen to be on


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens"),
    [pytest.param(1, 24, marks=NIGHT), pytest.param(4, 5, marks=NIGHT), (1, 1)],
)
def test_an_engine_of_small_steps_starts_and_answers(
    device: torch.device, tmp_path: Path, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    assert backend.uses_triton(device)
    config = EngineConfig(
        model=checkpoints.save("llama3", tmp_path),
        device="cuda" if device.type == "cuda" else "cpu",
        dtype="float32",
        num_blocks=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    core = EngineCore(config)
    for name in ("one", "two"):
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        core.add(EngineRequest(request_id=name, prompt_token_ids=[5, 9, 7], sampling=sampling))
    said: dict[str, list[int]] = {"one": [], "two": []}
    while core.has_work():
        for output in core.step():
            assert output.finish_reason in (None, "length")
            said[output.request_id] += output.token_ids
    assert said["one"] == said["two"] == checkpoints.generate("llama3", [5, 9, 7], 2)
