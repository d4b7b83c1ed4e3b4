"""Layers that are played say what layers that are run say, and what cannot be played is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.kernels.cpu import backend as cpu_backend
from engine.kernels.cpu import layer_program as cpu_program
from engine.kernels.cpu.layer_program import LayerPrograms
from engine.kernels.pointwise.rms_norm import add_rms_norm, rms_norm
from engine.protocol import EngineRequest, SamplingParams
from tests.engine import checkpoints

pytestmark = pytest.mark.skipif(
    not cpu_backend.uses_cpu_kernels(torch.device("cpu")), reason="numba or libgomp is not here"
)
WEIGHT = torch.linspace(0.5, 1.5, 32)


def twice(between: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Two layers, each a norm and what is `between`."""

    def layers(residual: Tensor, before_layer: Callable[[], None]) -> tuple[Tensor, Tensor]:
        before_layer()
        delta = between(rms_norm(residual, WEIGHT, 1e-5))
        before_layer()
        return between(add_rms_norm(delta, residual, WEIGHT, 1e-5)), residual

    return layers


def run(programs: LayerPrograms, x: Tensor, layers: Callable[..., object]) -> list[Tensor]:
    with torch.inference_mode():
        return [y.clone() for y in programs.run(x.clone(), {}, 0, layers)]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_program_is_played_on_new_values(threads: int) -> None:
    torch.set_num_threads(threads)
    programs, calls = LayerPrograms(4096), []

    def seen(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x

    layers = twice(seen)
    for seed in range(4):
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(seed))
        expected = layers(x.clone(), cpu_program.do_nothing)
        found = run(programs, x, layers)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(calls) == 2 * 4 + 2, "recorded once"


def test_a_large_step_is_recorded_when_its_size_comes_again() -> None:
    torch.set_num_threads(2)
    programs, calls = LayerPrograms(4096), []

    def seen(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x

    layers = twice(seen)
    for size in [300, 301, 300, 300, 300, 302]:
        x = torch.randn(size, 32)
        expected = twice(lambda x: x)(x.clone(), cpu_program.do_nothing)
        found = run(programs, x, layers)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert calls == [300, 300, 301, 301, 300, 300, 302, 302], "run, run, recorded, played, played"


def test_what_another_operator_does_is_done_every_time() -> None:
    programs = LayerPrograms(4096)
    layers = twice(lambda x: x * 2)
    for seed in range(3):
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(seed))
        expected = layers(x.clone(), cpu_program.do_nothing)
        found = run(programs, x, layers)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_no_more_threads_play_than_there_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention has memory for so many: another engine in the process may have changed it."""
    torch.set_num_threads(2)
    programs = LayerPrograms(4096)
    layers = twice(lambda x: x)
    x = torch.randn(3, 32)
    for _ in range(3):
        run(programs, x, layers)
    teams: list[int] = []
    start = cpu_backend.start
    monkeypatch.setattr(
        cpu_backend, "start", lambda *call: (teams.append(call[2]), start(*call))[1]
    )
    torch.set_num_threads(1)
    for _ in range(40):
        run(programs, x, layers)
    assert teams == [1] * 40


def test_what_does_not_fit_in_the_arena_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_program, "MAX_ALLOCATIONS", 1)
    programs = LayerPrograms(0)
    layers = twice(lambda x: x)
    x = torch.randn(30, 32)
    expected = layers(x.clone(), cpu_program.do_nothing)
    for _ in range(2):
        assert torch.equal(run(programs, x, layers)[0], expected[0])


@pytest.mark.parametrize("name", ["qwen3", "mistral_wide"])
def test_an_engine_says_the_same_with_and_without(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints.save(name, tmp_path)
    said = [_answers(folder)]
    monkeypatch.setattr("engine.models.decoder.MAX_TOKENS", 0)
    said.append(_answers(folder))
    assert said[0] == said[1] and len(said[0]) == 6


def _answers(folder: Path) -> dict[str, list[int]]:
    core = EngineCore(
        EngineConfig(model=folder, device="cpu", dtype="float32", kv_cache_bytes=1 << 22)
    )
    for i in range(6):
        prompt = list(range(3 + i, 10 + 7 * i))
        sampling = SamplingParams(max_tokens=10 + i, temperature=0.0, ignore_eos=True)
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, sampling=sampling))
    said: dict[str, list[int]] = {}
    while core.has_work():
        for output in core.step():
            said.setdefault(output.request_id, []).extend(output.token_ids)
    return said
