"""Configures how a gateway process logs, and finds in a log why its writer left."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from foundation import logs

MAX_TAIL_BYTES = 64 * 1024
SUPERVISOR = "supervisor"
"""Its name in every line; what it prints, a person may paste."""
GROUP_BORDER = " |+-"
"""The characters that `traceback` draws around the members of an exception group."""
CLOSING_REMARKS = ("Application startup failed. Exiting.",)
"""Lines that uvicorn logs after the error itself; they add nothing."""


def configure(level: str, *, json_lines: bool, process: str) -> None:
    """Configure logging once per process, before anything logs.

    `level`: debug, info, warning or error. `process`: its name in every line.
    """
    logs.configure(level, json_lines=json_lines, process=process)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if process == SUPERVISOR:
        # The supervisor says which models are ready, and then an example that ends the output:
        # its watchdogs connect after that.
        logging.getLogger("engine.transport.client").setLevel(logging.WARNING)


def worker_name(worker_id: str) -> str:
    """Return what the log calls a worker; a supervisor's have ids that begin with their place."""
    return f"worker-{worker_id}" if worker_id[:1].isdigit() else worker_id


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
        record = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return line
    if record and "level" not in record:
        return line  # of something else
    if record.get("level") not in ("error", "critical"):
        return ""
    return str(record.get("exception") or record.get("message", ""))
