"""Tells how a server's process ended and what it complained of last, for the operator who asks.
Pure.

What a process writes may be anything: it loses what a terminal would obey and the credentials that
the process was given, and is so many lines. It is shown to no client and stands in no log.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

import msgspec

from mcp_bridge.text_safety.hidden_text import stripped
from mcp_bridge.upstream.launch_spec import LaunchSpec
from mcp_bridge.upstream.redaction import MIN_HIDDEN_CHARS, without, written

MAX_LINES = 20
MAX_LINE_CHARS = 500
SHELLS_SIGNAL = 128
"""What a shell or a sandbox adds to the signal that ended what it ran."""
SOUNDS_SECRET = re.compile(r"(?i:.*(?:KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|_PAT\b|COOKIE|DSN).*)")
"""Of a fixed variable's name: its value is to be none, and may be all the same."""


class LastWords(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a process.

    `ended`: the status or the signal, by name. `lines`: the last of its stderr, oldest first.
    """

    server: str
    ended: str
    lines: tuple[str, ...]


def ending_of(returncode: int | None, sent: int | None) -> str:
    """Return how a process ended, for people.

    `returncode`: negative, a signal. `sent`: the last signal that was ours, while it lived.
    """
    if returncode is None:
        return "still there"
    if sent is not None and returncode == -sent:
        return f"{name_of(sent)}, which was ours: it did not leave when its stdin was closed"
    if returncode < 0:
        return name_of(-returncode)
    beyond = returncode - SHELLS_SIGNAL
    is_signal = beyond in {each.value for each in signal.Signals}
    return f"status {returncode}" + (f" ({SHELLS_SIGNAL} + {name_of(beyond)})" if is_signal else "")


def name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def secrets_of(spec: LaunchSpec, credentials: Iterable[str]) -> list[str]:
    """Return what a process was given that nobody else is to read."""
    fixed = [value for name, value in spec.environment.items() if SOUNDS_SECRET.fullmatch(name)]
    return [*credentials, *fixed]


def lines_of(tail: bytes, secrets: Iterable[str], *, is_cut: bool) -> tuple[str, ...]:
    """Return the last lines of `tail`.

    `is_cut`: there was more before it, so its first line may begin amid a secret.
    """
    hidden = written(secrets)
    if is_cut:
        _, newline, behind = tail.partition(b"\n")
        tail = behind if newline else tail[max(map(len, hidden), default=MIN_HIDDEN_CHARS) :]
    text = stripped(without(tail, hidden).decode(errors="replace"))
    # Once more: a secret may have been broken up by what is taken away.
    shown = without(text.encode(errors="replace"), hidden).decode(errors="replace")
    lines = [line.rstrip() for line in shown.splitlines() if line.strip()]
    return tuple(cut(line) for line in lines[-MAX_LINES:])


def cut(line: str) -> str:
    return line if len(line) <= MAX_LINE_CHARS else line[: MAX_LINE_CHARS - 1] + "…"
