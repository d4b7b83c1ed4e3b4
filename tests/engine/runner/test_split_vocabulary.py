"""An engine whose layers are cut over two ranks says what one rank alone says; where all is greedy,
the ranks tell each other the most likely of their tokens, and no logits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.core import engine_core
from engine.core.engine_core import EngineCore
from engine.protocol import EngineRequest, SamplingParams
from engine.weights.loader import load_model
from tests.engine import checkpoints
from tests.engine.weights.test_weights import ThreadRank, pad_vocabulary, ranks

VOCAB = 200
PROMPTS = [[5, 17, 101, 44, 90, 3], [7], [3 + (11 * i) % 190 for i in range(40)]]
GREEDY: dict[str, Any] = {"temperature": 0.0}
OTHERS: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 0.8, "seed": 5},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.3},
    "logprobs": {"temperature": 0.0, "logprobs": 1},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = checkpoints.save("llama_biases", tmp_path_factory.mktemp("split"))
    pad_vocabulary(folder, VOCAB)
    return folder


def said(folder: Path, samplings: list[dict[str, Any]]) -> list[tuple[list[int], str | None]]:
    config = EngineConfig(
        model=folder, dtype="float32", device="cpu", num_blocks=32, itl_target_s=0.0,
        max_num_batched_tokens=24,
    )  # fmt: skip
    core = EngineCore(config)
    texts: dict[str, list[int]] = {}
    reasons: dict[str, str | None] = {}
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True)):
        params = SamplingParams(max_tokens=9, ignore_eos=True, **sampling)
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling=params))
        texts[str(i)] = []
    while core.has_work():
        for output in core.step():
            texts[output.request_id] += output.token_ids
            reasons[output.request_id] = output.finish_reason
    return [(texts[key], reasons[key]) for key in texts]


def by_two(
    folder: Path, samplings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[list[int], str | None]], set[int]]:
    """Return what both ranks say, and how many numbers of a row went from one to the other."""
    own, widths, gather = threading.local(), set[int](), ThreadRank.all_gather

    def watched(rank: ThreadRank, x: Tensor) -> Tensor:
        widths.add(x.shape[-1])
        return gather(rank, x)

    def load(*args: Any, **options: Any) -> Any:
        return load_model(*args, group=own.rank, **options)

    def serve(rank: ThreadRank) -> list[tuple[list[int], str | None]]:
        own.rank = rank
        return said(folder, samplings)

    with monkeypatch.context() as patch:
        patch.setattr(ThreadRank, "all_gather", watched)
        patch.setattr(engine_core, "load_model", load)
        patch.setattr(engine_core, "warm_up", lambda *_, **__: None)  # which is not greedy
        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(serve, ranks(2))
    assert first == second
    return first, widths


def test_greedy_ranks_exchange_tokens_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samplings = [GREEDY] * len(PROMPTS)
    found, widths = by_two(folder, samplings, monkeypatch)
    assert found == said(folder, samplings)
    assert {token < VOCAB // 2 for text, _ in found for token in text} == {True, False}
    assert widths == {1}


@pytest.mark.parametrize("other", OTHERS)
def test_one_row_that_needs_more_gets_all(
    other: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samplings = [GREEDY, OTHERS[other], GREEDY]
    found, widths = by_two(folder, samplings, monkeypatch)
    assert found == said(folder, samplings)
    assert VOCAB // 2 in widths


def test_a_row_without_numbers_ends_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in folder.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["model.embed_tokens.weight"][PROMPTS[1][0]] = torch.nan
    save_file(tensors, broken / "model.safetensors")
    found, widths = by_two(broken, [GREEDY] * len(PROMPTS), monkeypatch)
    assert [reason for _, reason in found] == ["length", "error", "length"]
    assert widths == {1}
