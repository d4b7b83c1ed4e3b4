"""Cutting rows into chunks: nothing is lost, and a changed row moves the cuts near it alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.backup.cutting import RowBatch, RowCutter

LEAST, MEAN, MOST = 40, 60, 200

row = st.binary(max_size=90).map(lambda data: data.replace(b"\n", b"") + b"\n")


def cut(rows: list[bytes], sizes: list[int] | None = None) -> list[RowBatch]:
    """Cut rows that come in pieces of these sizes, the last one again and again."""
    data, cutter, pieces = b"".join(rows), RowCutter(least=LEAST, mean=MEAN, most=MOST), []
    sizes = list(sizes or [len(data) or 1])
    while data:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        pieces += cutter.feed(data[:size])
        data = data[size:]
    return [*pieces, *cutter.finish()]


@given(st.lists(row, max_size=60), st.lists(st.integers(1, 120), min_size=1, max_size=20))
def test_chunks_are_the_rows_in_order_however_they_come(
    rows: list[bytes], sizes: list[int]
) -> None:
    pieces = cut(rows, sizes)
    assert pieces == cut(rows)
    assert b"".join(piece.data for piece in pieces) == b"".join(rows)
    assert [piece.data.count(b"\n") for piece in pieces] == [piece.rows for piece in pieces]
    for piece in pieces:
        assert len(piece.data) <= MOST or piece.rows == 1
    assert all(
        len(piece.data) >= LEAST or len(piece.data + after.data) > MOST
        for piece, after in zip(pieces, pieces[1:], strict=False)
    )


@pytest.mark.parametrize("change", ["added", "changed", "removed"])
def test_a_row_that_differs_leaves_most_chunks_as_they_were(change: str) -> None:
    rng = random.Random(7)
    rows = [rng.randbytes(12).hex().encode() + b"\n" for _ in range(4000)]
    before = {piece.data for piece in cut(rows)}
    other = list(rows)
    if change == "added":
        other.insert(1500, b"one more\n")
    elif change == "changed":
        other[1500] = b"another\n"
    else:
        del other[1500]
    after = {piece.data for piece in cut(other)}
    assert 0 < len(after - before) <= 8 < len(before) // 10


def test_a_row_without_an_end_is_an_error() -> None:
    cutter = RowCutter()
    assert list(cutter.feed(b"whole\nhalf")) == []
    with pytest.raises(ValueError, match="no end"):
        list(cutter.finish())
