"""Launch parameters come from the device's own table, and from the code where it has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.kernels import tuning


def test_the_file_is_named_for_the_device() -> None:
    assert tuning.device_slug("NVIDIA H200") == "nvidia-h200"
    assert tuning.device_slug("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"


def test_what_was_measured_lies_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"op": {"key": {"num_warps": 8}}}))
    table = tuning.read_table(path)
    monkeypatch.setattr(tuning, "_table", lambda: table)
    default = {"num_warps": 4, "block": 64}
    assert tuning.launch_config("op", "key", default) == {"num_warps": 8, "block": 64}
    assert tuning.launch_config("op", "other", default) == default
    assert tuning.launch_config("none", "key", default) == default


def test_a_device_nobody_measured_has_no_table(tmp_path: Path) -> None:
    assert tuning.read_table(tmp_path / "gpu.json") == {}


def test_a_table_holds_integers(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"op": {"key": {"num_warps": "8"}}}))
    with pytest.raises(ValueError, match="op key"):
        tuning.read_table(path)
