"""Checks that what a request says does not depend on its lane, its tenant or its pauses: the whole
engine, with a small model, few blocks and `--deterministic`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineRequest, SamplingParams
from tests.engine import checkpoints

Answers = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save("llama3", tmp_path_factory.mktemp("lanes"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    core, found = start(folder), Answers()
    for number in range(10):
        found |= say(core, [asked(number)], None)
    return found


def start(folder: Path, **changes: Any) -> EngineCore:
    options: dict[str, Any] = {"num_blocks": 64, "dtype": "float32", "deterministic": True}
    return EngineCore(EngineConfig(model=folder, **(options | changes)))


def asked(number: int, **turn: Any) -> EngineRequest:
    sampling = SamplingParams(
        max_tokens=24, temperature=1.0 if number % 2 else 0.0, seed=number, ignore_eos=True
    )
    return EngineRequest(
        request_id=f"r{number}",
        prompt_token_ids=[5 + number, *range(6, 6 + 7 * (number % 4))],
        sampling=sampling,
        n=2 if number == 5 else 1,
        **turn,
    )


def say(core: EngineCore, requests: list[EngineRequest], rng: random.Random | None) -> Answers:
    """rng: of pauses; None: there are none."""
    said: Answers = {}
    for request in requests:
        core.add(request)
    paused: set[str] = set()
    for _ in range(5000):
        if rng is not None and rng.random() < 0.5:
            name = rng.choice(requests).request_id
            (core.resume if name in paused else core.pause)(name)
            paused ^= {name}
        if not core.has_work():
            for name in paused:
                core.resume(name)
            paused.clear()
        if not core.has_work():
            break
        for output in core.step():
            said.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        core.check_integrity()
    assert core.status().num_free_blocks == core.resolved.num_blocks
    return said


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 12, "max_model_len": 96},
        {"num_blocks": 12, "max_model_len": 96, "run_ahead": True},
        {"num_blocks": 12, "max_model_len": 96, "speculative": "ngram"},
        {"max_num_batched_tokens": 8, "max_num_seqs": 3},
    ],
    ids=str,
)
def test_lanes_tenants_and_pauses_change_no_text(
    folder: Path, expected: Answers, options: dict[str, Any]
) -> None:
    rng = random.Random(7)
    turns = [
        {
            "lane": rng.choice(["interactive", "agentic", "batch"]),
            "tenant": rng.choice("ab"),
            "weight": rng.choice([0.5, 1.0, 2.0]),
        }
        for _ in range(10)
    ]
    core = start(folder, **options)
    requests = [asked(number, **turn) for number, turn in enumerate(turns)]
    assert say(core, requests, rng) == expected
    assert core.status().num_preemptions > 0, "for blocks, or for the place of a paused one"
