"""An operator reads of a process that left a bounded text, and nothing that it was given."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_bridge.text_safety.hidden_text import hidden
from mcp_bridge.upstream.redaction import spellings
from mcp_bridge.upstream.stdio.stderr_tail import (
    MAX_LINE_CHARS,
    MAX_LINES,
    ending_of,
    lines_of,
    secrets_of,
)
from tests.mcp_bridge.upstream.stdio.servers import python_spec

SECRETS = [
    "hunter-22",
    "Bearer sk-abc/def+1",
    "-----BEGIN KEY-----\nMIIEvQIBADAN\n-----END KEY-----",
]
NOISE = st.sampled_from(
    ["\x1b[31m", "\u200b", "\r", "\n", "x", "\u202e", "\x1b]8;;http://h\x07", "é"]
)


@given(st.lists(st.one_of(NOISE, st.sampled_from(SECRETS), st.text(max_size=30)), max_size=60))
def test_no_secret_and_nothing_hidden_is_said(parts: list[str]) -> None:
    tail = "".join(parts).encode(errors="replace")
    lines = lines_of(tail, SECRETS, is_cut=False)
    assert len(lines) <= MAX_LINES and all(len(line) <= MAX_LINE_CHARS for line in lines)
    said = "\n".join(lines)
    assert not [each for each in spellings(SECRETS) if each in said.encode()]
    assert not list(hidden(said)) and "\r" not in said


@pytest.mark.parametrize("size", range(1, len(SECRETS[0]) + 1))
@pytest.mark.parametrize("behind", [b"", b"\nthe end"])
def test_a_secret_that_the_bound_cut_is_not_said_in_part(size: int, behind: bytes) -> None:
    tail = SECRETS[0].encode()[-size:] + behind
    lines = lines_of(tail, SECRETS, is_cut=True)
    assert lines == (("the end",) if behind else ())


def test_a_secret_that_colours_break_up_is_one() -> None:
    (line,) = lines_of(b"bad key hun\x1b[1mter-22!", SECRETS, is_cut=False)
    assert line == "bad key [credential]!"


def test_the_last_lines_are_kept_and_long_ones_cut() -> None:
    tail = "".join(f"line {n}\n" for n in range(100)) + "y" * 5000
    lines = lines_of(tail.encode(), [], is_cut=False)
    assert lines[0] == "line 81" and lines[-2] == "line 99" and lines[-1].endswith("y…")


@pytest.mark.parametrize(
    ("returncode", "sent", "said"),
    [
        (3, None, "status 3"),
        (0, signal.SIGTERM, "status 0"),
        (-signal.SIGSEGV, None, "SIGSEGV"),
        (-signal.SIGSEGV, signal.SIGTERM, "SIGSEGV"),
        (-signal.SIGTERM, signal.SIGTERM, "SIGTERM, which was ours"),
        (137, None, "status 137 (128 + SIGKILL)"),
        (255, None, "status 255"),
        (-63, None, "signal 63"),
        (None, signal.SIGKILL, "still there"),
    ],
)
def test_an_ending_has_a_name(returncode: int | None, sent: int | None, said: str) -> None:
    assert ending_of(returncode, sent).startswith(said)
    assert len(ending_of(returncode, sent)) >= len(said)


def test_a_fixed_value_by_the_name_of_a_secret_is_one() -> None:
    spec = python_spec("", environment={"GITHUB_TOKEN": "ghp_1", "ROOT": "/srv", "API_KEY": "k"})
    assert secrets_of(spec, ["v"]) == ["v", "ghp_1", "k"]
