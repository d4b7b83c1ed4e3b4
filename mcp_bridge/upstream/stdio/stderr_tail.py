"""Describes how a server process ended and what it wrote to stderr last, for the operator. Pure.

The lines lose terminal controls and the credentials of the process, and are bounded. They are in no
log and no client sees them.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

import msgspec

from mcp_bridge.text_safety.hidden_text import stripped
from mcp_bridge.upstream.launch_spec import LaunchSpec
from mcp_bridge.upstream.redaction import MIN_HIDDEN_CHARS, spellings, without

MAX_LINES = 20
MAX_LINE_CHARS = 500
SHELLS_SIGNAL = 128
"""The exit status of a shell or sandbox is this plus the signal that ended its child."""
SOUNDS_SECRET = re.compile(r"(?i:.*(?:KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|_PAT\b|COOKIE|DSN).*)")
"""Names of fixed variables whose values are treated as secrets, though they should be none."""


class LastWords(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a process. `ended`: its status or signal. `lines`: the last ones of its stderr."""

    server: str
    ended: str
    lines: tuple[str, ...]


def ending_of(returncode: int | None, sent: int | None) -> str:
    """Return how a process ended, for people. `sent`: the last signal that we sent."""
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
    """Return the secrets that a process got."""
    fixed = [value for name, value in spec.environment.items() if SOUNDS_SECRET.fullmatch(name)]
    return [*credentials, *fixed]


def lines_of(tail: bytes, secrets: Iterable[str], *, is_cut: bool) -> tuple[str, ...]:
    """Return the last lines of `tail`. `is_cut`: its beginning may be the rest of a secret."""
    hidden = spellings(secrets)
    if is_cut:
        _, newline, behind = tail.partition(b"\n")
        tail = behind if newline else tail[max(map(len, hidden), default=MIN_HIDDEN_CHARS) :]
    text = stripped(without(tail, hidden).decode(errors="replace"))
    # Again: removed control characters may have separated the parts of a secret.
    shown = without(text.encode(errors="replace"), hidden).decode(errors="replace")
    lines = [line.rstrip() for line in shown.splitlines() if line.strip()]
    return tuple(cut(line) for line in lines[-MAX_LINES:])


def cut(line: str) -> str:
    return line if len(line) <= MAX_LINE_CHARS else line[: MAX_LINE_CHARS - 1] + "…"
