"""Messages of JSON-RPC, one a line: MCP's stdio transport (2025-11-25, basic/transports).

Pure: bytes in, whole lines out. The SDK's own reader keeps a line of any length and copies it with
each read; here a line has a cap and each byte is looked at once, in whatever pieces it comes.
"""

from __future__ import annotations

MAX_LINE_BYTES = 4 * 1024 * 1024
"""Of one message, without its newline."""
NEWLINE = b"\n"
BLANK = b" \t\r"


class LineOverflow(Exception):
    """A line is longer than the cap. What came of it is dropped; nothing can follow."""


class Framer:
    """Cuts what a server writes into lines. Not usable any more once it has raised."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._held = bytearray()

    @property
    def held_bytes(self) -> int:
        """Return the bytes of a line that is not whole yet; never above the cap."""
        return len(self._held)

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without newline and blanks around; empty ones are left
        out. Raises: LineOverflow, before anything of such a line is kept; the whole ones before it
        are its only argument.
        """
        lines: list[bytes] = []
        start = 0
        while (end := data.find(NEWLINE, start)) >= 0:
            self._take(data, start, end, lines)
            line = bytes(self._held.strip(BLANK))
            self._held.clear()
            if line:
                lines.append(line)
            start = end + 1
        if start < len(data):
            self._take(data, start, len(data), lines)
        return lines

    def _take(self, data: bytes, start: int, end: int, lines: list[bytes]) -> None:
        """Take bytes into one buffer, not a list of pieces: a server that writes single bytes would
        make each of them an object of its own."""
        if len(self._held) + end - start > self._max_line_bytes:
            self._held.clear()
            raise LineOverflow(lines)
        self._held += memoryview(data)[start:end]
