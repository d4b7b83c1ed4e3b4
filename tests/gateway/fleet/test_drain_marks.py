"""Marks are seen by all that map the file, and are of numbers."""

from __future__ import annotations

from pathlib import Path

from gateway.fleet.drain_marks import MAX_ENGINES, DrainMarks


def test_who_maps_the_file_sees_a_mark_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "drain_marks"
    one, other = DrainMarks(path), DrainMarks(path)
    assert 3 not in other
    one.mark(3)
    assert 3 in other and 3 in DrainMarks(path), "an engine that is started again stays marked"
    assert 2 not in other and MAX_ENGINES not in other
    other.remove(3)
    other.remove(3)
    other.remove(MAX_ENGINES)
    assert 3 not in one
    one.close()
    assert 3 not in other
