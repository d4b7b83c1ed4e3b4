"""Marks are seen by all that map the file, and are of numbers."""

from __future__ import annotations

from pathlib import Path

from gateway.fleet.drain_marks import MAX_ENGINES, NEVER_DRAINED, DrainMarks


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


def test_a_mark_tells_since_when_it_is_there_or_gone(tmp_path: Path) -> None:
    moments = iter([100.0, 200.0, 300.0])
    marks = DrainMarks(tmp_path / "drain_marks", clock=moments.__next__)
    mark = marks.of(3)
    marks.remove(3)
    assert not mark.is_set and mark.changed_at is None, "it never was"
    marks.mark(3)
    marks.mark(3)
    assert mark.is_set and mark.changed_at == 100.0
    marks.remove(3)
    marks.remove(3)
    assert not mark.is_set and mark.changed_at == 200.0
    assert not NEVER_DRAINED.is_set and NEVER_DRAINED.changed_at is None
