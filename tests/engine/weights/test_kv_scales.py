"""Stored scales of a float8 KV cache are loaded, in every form, and used; defects are named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.parallel import own_shard
from engine.weights.checkpoint import Checkpoint, CheckpointWeights
from engine.weights.quantization import read_kv_scales
from engine.weights.reading import TensorReader
from tests.engine import checkpoints, kv_scaled
from tests.engine.weights.test_weights import load, ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("form", kv_scaled.FORMS)
def test_keys_and_values_fit_by_their_scales(
    form: str, deterministic: bool, tmp_path: Path
) -> None:
    core = kv_scaled.start(kv_scaled.save(tmp_path / form, form), CPU, deterministic=deterministic)
    factors = kv_scaled.FORMS[form][1]
    for layer in core._stepper._runner._cache:
        assert layer.k_scale is not None and layer.v_scale is not None
        assert torch.equal(layer.k_scale, factors) and torch.equal(layer.v_scale, factors)
    plain = kv_scaled.start(
        checkpoints.save(kv_scaled.MODEL, tmp_path / "plain"), CPU, deterministic=deterministic
    )
    assert kv_scaled.same(kv_scaled.say(core, 24), kv_scaled.say(plain, 24))


@pytest.mark.parametrize("form", ["a number", "a head"])
def test_without_them_it_is_another_model(form: str, tmp_path: Path) -> None:
    """So that the test above can fail: as if the scales were 1, or one for all heads."""
    folder = kv_scaled.save(tmp_path, form)
    core, right = kv_scaled.start(folder, CPU), kv_scaled.start(folder, CPU)
    for layer in core._stepper._runner._cache:
        assert layer.k_scale is not None and layer.v_scale is not None
        layer.k_scale.fill_(1.0 if form == "a number" else 512.0)
        layer.v_scale.fill_(1.0 if form == "a number" else 512.0)
    assert not kv_scaled.same(kv_scaled.say(core, 24), kv_scaled.say(right, 24))


def test_a_cache_of_full_width_needs_none(tmp_path: Path) -> None:
    core = kv_scaled.start(kv_scaled.save(tmp_path / "own", "a head"), CPU, kv_cache_dtype="auto")
    assert all(layer.k_scale is None for layer in core._stepper._runner._cache)
    plain = checkpoints.save(kv_scaled.MODEL, tmp_path / "plain")
    exact = kv_scaled.say(kv_scaled.start(plain, CPU, kv_cache_dtype="auto"), 8)
    assert kv_scaled.same(kv_scaled.say(core, 8), exact)


def test_a_rank_has_its_own_heads(tmp_path: Path) -> None:
    folder = kv_scaled.save(tmp_path / "head", "a head")
    whole = kv_scaled.save(tmp_path / "number", "a number")
    kv_scaled.change(whole, {"k_scale": torch.tensor([3.0])})
    for rank in ranks(2):
        found = []
        for each in (folder, whole):
            with TensorReader(CPU) as reader:
                weights = CheckpointWeights(
                    Checkpoint(each), reader, dtype=torch.float32, device=CPU
                )
                name = "model.layers.0.self_attn"
                found.append(read_kv_scales(weights, name, 2, own_shard(rank)))
        by_head, alike = found
        assert by_head is not None and alike is not None
        assert torch.equal(by_head.k, kv_scaled.BY_HEAD[rank.rank : rank.rank + 1])
        assert alike.k.tolist() == [3.0] and alike.v.tolist() == [512.0]


DEFECTS: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "one of two": ({"v_scale": None}, r"self_attn has a scale .* v_scale is missing"),
    "three heads": ({"k_scale": torch.ones(3)}, r"k_scale has shape \[3\], .* asks for \[2\]"),
    "nothing": ({"k_scale": torch.zeros(2)}, r"k_scale is not a scale: \[0.0, 0.0\]"),
    "no number": ({"v_scale": torch.tensor([torch.nan])}, "v_scale is not a scale"),
    "integers": ({"k_scale": torch.ones(2).int()}, "k_scale is I32, not "),
    "of another kind": ({"k_zero_point": torch.zeros(2)}, "belong to no layer.*k_zero_point"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named(defect: str, tmp_path: Path) -> None:
    folder = kv_scaled.save(tmp_path, "a head")
    changes, message = DEFECTS[defect]
    kv_scaled.change(folder, changes)
    with pytest.raises(ConfigError, match=message):
        load(folder)
