"""Tests that `--explain` says what an engine runs with, and why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.__main__ import main
from engine.config import EngineConfig
from engine.core import product_ways
from engine.core.engine_core import EngineCore
from engine.core.explanation import explain
from engine.kernels.choice import products
from engine.kernels.choice.microkernel import microkernel
from engine.kernels.cpu.backend import uses_cpu_kernels
from engine.kernels.cpu.compiling.kernel_cache import KernelCache
from foundation import logs
from tests.engine import checkpoints


@pytest.fixture(autouse=True)
def nothing_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is measured for one test alone."""
    monkeypatch.setattr(product_ways, "kernel_cache", lambda: KernelCache(tmp_path))
    monkeypatch.setattr(products, "_uses", {})
    monkeypatch.setattr(products, "_choices", {})
    monkeypatch.setattr(products, "FEWEST_WEIGHTS", 0)


@pytest.mark.skipif(
    not uses_cpu_kernels(torch.device("cpu")) or microkernel() is None,
    reason="torch has no microkernel for this processor",
)
def test_a_start_measures_and_explains(tmp_path: Path) -> None:
    folder = checkpoints.save("mistral_wide", tmp_path / "model")
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "num_blocks": 8}
    config = EngineConfig(model=folder, **options)
    told = explain(EngineCore(config).resolved)
    for choice in products.choices():
        assert choice.came_from == "measured" and choice.question in told
    assert any(choice.question.startswith("attention") for choice in products.choices())
    assert "num_blocks" in told and "asked for" in told
    products._choices.clear()
    products._uses.clear()
    config = EngineConfig(model=folder, deterministic=True, **options)
    told = explain(EngineCore(config).resolved)
    assert products.choices() == [] and "--deterministic keeps one" in told


def test_the_command_explains_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    folder = checkpoints.save("llama3", tmp_path)
    assert main(["--explain", "--model", str(folder), "--num-blocks", "8", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^num_blocks +8 +asked for$", told, re.MULTILINE)
    assert re.search(r"^dtype +float32 +the checkpoint and the device$", told, re.MULTILINE)
    assert "own tiles, always: in float32 they were never slower" in told
    with pytest.raises(SystemExit):
        main(["--model", str(folder)])
    assert "the following arguments are required: --listen" in capsys.readouterr().err
