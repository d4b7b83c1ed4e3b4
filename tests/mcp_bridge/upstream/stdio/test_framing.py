"""Lines of a server, in whatever pieces they come."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_bridge.upstream.stdio.transport import Framer, LineOverflow

LINES = st.lists(st.binary(max_size=40).map(lambda line: line.replace(b"\n", b"")), max_size=12)


def fed(framer: Framer, written: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(cut % (len(written) + 1) for cut in cuts), len(written)]
    return [line for start, end in pairwise(at) for line in framer.feed(written[start:end])]


@given(LINES, st.lists(st.integers(min_value=0), max_size=20))
def test_any_cut_gives_the_same_lines(lines: list[bytes], cuts: list[int]) -> None:
    written = b"".join(line + b"\n" for line in lines)
    expected = [line.strip(b" \t\r") for line in lines if line.strip(b" \t\r")]
    framer = Framer()
    assert fed(framer, written, cuts) == expected
    assert framer.held_bytes == 0


@given(LINES, st.lists(st.integers(min_value=0), max_size=20), st.integers(1, 30))
def test_the_cap_falls_on_the_same_line_however_it_is_cut(
    lines: list[bytes], cuts: list[int], cap: int
) -> None:
    written = b"".join(line + b"\n" for line in lines)
    good = []
    for line in lines:
        if len(line) > cap:
            break
        good.append(line.strip(b" \t\r"))
    framer = Framer(cap)
    found: list[bytes] = []
    at = [0, *sorted(cut % (len(written) + 1) for cut in cuts), len(written)]
    try:
        for start, end in pairwise(at):
            found += framer.feed(written[start:end])
            assert framer.held_bytes <= cap
    except LineOverflow as overflow:
        found += overflow.args[0]
        assert any(len(line) > cap for line in lines)
    else:
        assert all(len(line) <= cap for line in lines)
    assert found == [line for line in good if line]


def test_a_line_of_the_cap_passes_and_one_more_byte_does_not() -> None:
    assert Framer(8).feed(b"12345678\n") == [b"12345678"]
    with pytest.raises(LineOverflow):
        Framer(8).feed(b"123456789")


def test_a_flood_without_a_newline_keeps_no_more_than_the_cap() -> None:
    framer = Framer(1024 * 1024)
    most = 0
    with pytest.raises(LineOverflow):
        for _ in range(1024):  # 64 MiB in all
            framer.feed(b"x" * 65536)
            most = max(most, framer.held_bytes)
    assert most <= 1024 * 1024
    assert framer.held_bytes == 0


def test_single_bytes_make_a_line() -> None:
    framer = Framer()
    for _ in range(100_000):
        assert framer.feed(b"y") == []
    assert framer.feed(b"\n") == [b"y" * 100_000]
