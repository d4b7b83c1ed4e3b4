"""The benchmark of the index of cached prefixes, in small: it finds what it has put there."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.fleet import index


def test_a_table_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(index, "ROUNDS", 3)
    look_up_us, bytes_a_block = index.measure_table(tmp_path / "index", 16_000, random.Random(1))
    assert look_up_us > 0 and 6 <= bytes_a_block <= 24
    assert "2000 spans of 16000" in capsys.readouterr().out
