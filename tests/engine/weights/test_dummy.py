"""Random weights: any model runs on config.json alone, at a sane scale."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.layers.parallel import Shard
from engine.protocol import EngineRequest, SamplingParams
from engine.weights.dummy import POOL, DummyWeights
from tests.engine import checkpoints

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", sorted(checkpoints.MODELS))
def test_every_model_generates_from_its_config_alone(name: str, tmp_path: Path) -> None:
    stored = checkpoints.save(name, tmp_path / "stored")
    folder = tmp_path / "config"
    folder.mkdir()
    shutil.copy(stored / "config.json", folder)
    first, again, other = (generate(folder, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) > 4, "neither constant nor broken"


def generate(folder: Path, seed: int) -> list[int]:
    core = EngineCore(EngineConfig(model=folder, load_format="dummy", num_blocks=16, seed=seed))
    sampling = SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)
    core.add(EngineRequest(request_id="r", prompt_token_ids=[3, 5, 8], sampling=sampling))
    outputs = []
    while core.has_work():
        outputs += core.step()
    assert outputs[-1].finish_reason == "length"
    return [token_id for output in outputs for token_id in output.token_ids]


def test_scale_and_parts() -> None:
    """Unit variance in, unit variance out; parts put together are the whole."""
    weights = DummyWeights(dtype=torch.float32, device=CPU, seed=5)
    shape = (1500, 1024)
    whole = weights.take("model.layers.0.mlp.up_proj.weight", shape)
    assert whole.numel() > POOL, "the pool goes round within it"
    out = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1)) @ whole.T
    assert 0.9 < float(out.std()) < 1.1
    assert int(torch.linalg.matrix_rank(whole)) == 1024
    for dim in (0, 1):
        parts = [
            weights.take("model.layers.0.mlp.up_proj.weight", shape, Shard(i, 4, dim))
            for i in range(4)
        ]
        assert torch.equal(torch.cat(parts, dim), whole)
    other = weights.take("model.layers.1.mlp.up_proj.weight", shape)
    assert not torch.equal(other, whole)
    assert torch.equal(weights.take("model.norm.weight", (8,)), torch.ones(8))
    assert torch.equal(weights.take("model.layers.0.q_proj.bias", (8,)), torch.zeros(8))
