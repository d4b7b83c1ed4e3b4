"""The engine on its kernels, over a float8 cache, with the scales that the checkpoint stores."""

from __future__ import annotations

from pathlib import Path

import torch
import triton  # noqa: F401 (its interpreter is on for those who have imported it)

from engine.kernels import backend
from tests.engine import checkpoints, kv_scaled

NUM_TOKENS = 3


def test_keys_and_values_fit_by_their_scales(device: torch.device, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    assert backend.uses_triton(device)
    core = kv_scaled.start(kv_scaled.save(tmp_path / "own", "a head"), device)
    plain = kv_scaled.start(checkpoints.save(kv_scaled.MODEL, tmp_path / "plain"), device)
    wanted = kv_scaled.say(plain, NUM_TOKENS)
    assert kv_scaled.same(kv_scaled.say(core, NUM_TOKENS), wanted)
    for layer in core._stepper._runner._cache:  # so that it can fail
        assert layer.k_scale is not None and layer.v_scale is not None
        layer.k_scale.fill_(1.0)
        layer.v_scale.fill_(1.0)
    assert not kv_scaled.same(kv_scaled.say(core, NUM_TOKENS), wanted)
