"""How a gateway process logs: JSON lines to stderr for machines, or short lines for a person.

A record is what was said plus its exception; nothing here looks into requests, so no prompt and no
key can slip in.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec

MAX_TAIL_BYTES = 64 * 1024
GROUP_BORDER = " |+-"
"""The characters that `traceback` draws around the members of an exception group."""
CLOSING_REMARKS = ("Application startup failed. Exiting.",)
"""Lines that uvicorn logs after the error itself; they add nothing."""


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, process, and the exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure(level: str, *, json_lines: bool) -> None:
    """Configure logging once per process, before anything logs.

    `level`: debug, info, warning or error.
    """
    handler = logging.StreamHandler(sys.stderr)
    if json_lines:
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if not json_lines:
        # The supervisor says which models are ready, and then an example that ends the output:
        # its watchdogs connect after that.
        logging.getLogger("engine.transport.client").setLevel(logging.WARNING)


def last_error(path: Path, start: int) -> str:
    """The newest line of a log, from byte `start` on, that says why its writer left; one line.

    Reads JSON lines and plain ones; of an exception its last line, which names it.
    """
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - MAX_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    for line in reversed(lines):
        messages = [each for row in _said(line).splitlines() if (each := row.strip(GROUP_BORDER))]
        if messages and messages[-1] not in CLOSING_REMARKS:
            return messages[-1]
    return f"see {path}"


def _said(line: str) -> str:
    """The text of a JSON line of level error, nothing of a lower one; a plain line as it is."""
    try:
        record = msgspec.json.decode(line, type=dict[str, str | int])
    except msgspec.DecodeError:
        return line
    if record.get("level") not in ("error", "critical"):
        return ""
    return str(record.get("exception") or record.get("message", ""))
