"""The engine on its kernels, --deterministic: what it says of a request alone and in company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.core.engine_core import EngineCore
from engine.kernels.linear import deterministic_triton as deterministic_linear_triton
from engine.protocol import EngineRequest, SamplingParams, TokenLogprobs
from tests.engine.runner.test_deterministic import start

pytestmark = pytest.mark.usefixtures("products_without_place")

SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 67,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
ASKED = {"a": ([5, 9, 11] * 4, 3), "b": ([7, 3], 4), "c": (list(range(3, 40)), 2)}
Said = dict[str, list[tuple[int, TokenLogprobs]]]


def say(core: EngineCore, names: list[str]) -> Said:
    said: Said = {name: [] for name in names}
    for name in names:
        prompt, count = ASKED[name]
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=3)
        core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
    while core.has_work():
        for output in core.step():
            assert output.finish_reason in (None, "length")
            assert output.logprobs is not None or not output.token_ids
            said[output.request_id] += zip(output.token_ids, output.logprobs or [], strict=True)
    assert {name: len(tokens) for name, tokens in said.items()} == {n: ASKED[n][1] for n in names}
    return said


def test_alone_and_in_chunks_beside_others(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities to the bit."""
    torch.set_num_threads(1)
    calls: list[int] = []
    multiply = deterministic_linear_triton.multiply

    def note(x: torch.Tensor, **rest: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return multiply(x, **rest)

    monkeypatch.setattr(deterministic_linear_triton, "multiply", note)
    options = {"num_blocks": 24, "max_num_seqs": 4, "device": device.type}
    core = start(tmp_path, SMALL, **options, max_num_batched_tokens=64)
    alone: Said = {}
    for name in ASKED:
        alone |= say(core, [name])
    core = start(tmp_path, SMALL, **options, max_num_batched_tokens=20)
    assert say(core, list(ASKED)) == alone
    assert len(set(calls)) > 3
