"""The device's runner embeds as the plain one does, and waits for nothing when it launches: beside
decodes, chunk by chunk, preempted, a step ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.config import Pooling
from engine.models.decoder import Decoder
from engine.protocol import EngineRequest
from engine.runner.device.device_runner import DeviceRunner, graph_backend
from engine.runner.model_runner import ModelRunner
from tests.engine.kernels.device_runs import LIMITS, ask, load, runner_of, stepper_of
from tests.engine.kernels.test_device_runner import graphs_of, no_waiting, poison
from tests.engine.runner.test_embedding import write_modules

# Padding computes with poison, and numpy, on which the interpreter runs, says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MODES = {"last": "lasttoken", "mean": "mean_tokens"}
Vectors = dict[str, NDArray[np.float32]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def load_pooling(folder: Path, device: torch.device, pooling: Pooling, **changes: Any) -> Decoder:
    kinds = ["Transformer", "Pooling", "Normalize"]
    write_modules(folder, kinds, {f"pooling_mode_{MODES[pooling]}": True})
    return load(folder, device, **changes)


def embed(number: int, length: int, **changes: Any) -> EngineRequest:
    prompt = [3 + (7 * j + number) % 50 for j in range(length)]
    return EngineRequest(request_id=str(number), prompt_token_ids=prompt, embed=True, **changes)


def run(
    runner: ModelRunner,
    model: Decoder,
    requests: list[EngineRequest],
    *,
    ahead: bool = False,
    budget: int = LIMITS.max_num_tokens,
    before_step: Callable[[], None] = lambda: None,
) -> tuple[Vectors, dict[str, list[int]], int]:
    """The vectors, what was said, and how often somebody was preempted."""
    stepper, scheduler = stepper_of(
        runner,
        model.config.sliding_window,
        ahead=ahead,
        penalties_ahead=False,
        guesser=None,
        pooling=model.config.embedding.pooling,
    )
    scheduler._planner._max_num_batched_tokens = budget
    for request in requests:
        scheduler.add(request)
    vectors: Vectors = {}
    said: dict[str, list[int]] = {}
    while stepper.has_work():
        before_step()
        for output in stepper.step():
            assert output.error_code is None, output.error_code
            if output.embedding is None:
                said.setdefault(output.request_id, []).extend(output.token_ids)
            else:
                vectors[output.request_id] = np.frombuffer(output.embedding, "<f4")
    scheduler.check_integrity()
    return vectors, said, scheduler.num_preemptions


def against_plain(
    model: Decoder,
    requests: list[EngineRequest],
    num_blocks: int,
    *,
    ahead: bool,
    budget: int = LIMITS.max_num_tokens,
) -> tuple[Vectors, int]:
    plain = runner_of(model, num_blocks=num_blocks)
    wanted, text, _ = run(plain, model, requests, budget=budget)
    runner = graphs_of(model, num_blocks)
    launch = runner.launch

    def guarded(output: Any, before: Any = None) -> Any:
        with no_waiting(model.device):
            return launch(output, before)

    runner.launch = guarded  # type: ignore[method-assign]
    found, said, num_preemptions = run(
        runner, model, requests, ahead=ahead, budget=budget, before_step=lambda: poison(runner)
    )
    assert said == text
    assert found.keys() == wanted.keys()
    for key, vector in wanted.items():
        np.testing.assert_allclose(found[key], vector, rtol=0, atol=1e-5)
        assert abs(np.linalg.norm(vector) - 1) < 1e-5
    return wanted, num_preemptions


@pytest.mark.nightly
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_beside_decodes(device: torch.device, tmp_path: Path, pooling: Pooling) -> None:
    """A prompt of one token, one of a step, and one of several."""
    model = load_pooling(tmp_path, device, pooling)
    texts = [ask(i, range(3, 6 + i), max_tokens=5, temperature=0.0) for i in range(2)]
    prompts = [embed(2, 1), embed(3, 17, dimensions=5), embed(4, 47)]
    vectors, _ = against_plain(model, [*texts, *prompts], 24, ahead=True)
    assert {key: len(vector) for key, vector in vectors.items()} == {"2": 32, "3": 5, "4": 32}


@pytest.mark.nightly
@pytest.mark.parametrize("ahead", [False, True])
def test_a_mean_starts_over(device: torch.device, tmp_path: Path, ahead: bool) -> None:
    """A text comes to need the blocks of a prompt that is half embedded."""
    model = load_pooling(tmp_path, device, "mean")
    requests = [ask(0, range(3, 18), max_tokens=20, temperature=0.0), embed(1, 64)]
    _, num_preemptions = against_plain(model, requests, 6, ahead=ahead, budget=4)
    assert num_preemptions == 1


def test_a_model_without_a_head_has_no_graphs(device: torch.device, tmp_path: Path) -> None:
    model = load_pooling(tmp_path, device, "last", architectures=["LlamaModel"])
    runner = runner_of(model, graph_backend(device))
    assert isinstance(runner, DeviceRunner) and runner.decodes() == []
    found, _, _ = run(runner, model, [embed(0, 21)], ahead=True)
    wanted, _, _ = run(runner_of(model), model, [embed(0, 21)])
    np.testing.assert_allclose(found["0"], wanted["0"], rtol=0, atol=1e-5)
