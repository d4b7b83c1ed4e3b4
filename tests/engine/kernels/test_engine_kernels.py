"""The engine on its kernels says, token for token, what it says without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.kernels import backend
from engine.protocol import EngineRequest, SamplingParams
from tests.engine import checkpoints

PROMPTS = [[3 + (7 * i) % 90 for i in range(37)], [11, 5, 9], [3 + (7 * i) % 90 for i in range(20)]]
NUM_TOKENS = 5


def generate(folder: Path, device: torch.device) -> list[list[int]]:
    """Greedy texts of all prompts at once; a long one is cut into chunks."""
    config = EngineConfig(
        model=folder,
        device="cuda" if device.type == "cuda" else "cpu",
        dtype="float32",
        num_blocks=32,
        max_num_batched_tokens=24,
    )
    core = EngineCore(config)
    texts: dict[str, list[int]] = {}
    for i, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
        texts[str(i)] = []
    while core.has_work():
        for output in core.step():
            assert output.finish_reason in (None, "length")
            texts[output.request_id] += output.token_ids
        core.check_integrity()
    return list(texts.values())


@pytest.mark.parametrize(
    "name", ["llama3", pytest.param("mistral_window", marks=pytest.mark.nightly)]
)
def test_the_same_text(
    name: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped heads and chunks; the second with a window of 24 tokens and a head of 24 channels."""
    torch.set_num_threads(1)
    folder = checkpoints.save(name, tmp_path)
    assert backend.uses_triton(device)
    on_kernels = generate(folder, device)
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    assert not backend.uses_triton(torch.device("cpu"))
    assert on_kernels == generate(folder, torch.device("cpu"))
    assert [len(text) for text in on_kernels] == [NUM_TOKENS] * len(PROMPTS)
