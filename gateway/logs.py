"""Configures how a gateway process logs, keeps the files of logs below their bound, and finds in a
log why its writer left."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any, TextIO

import msgspec

from foundation import logs
from foundation.periodic import Periodic

log = logging.getLogger(__name__)

CUT_INTERVAL_S = 60.0
COPY_INTERVAL_S = 0.2
MAX_READ_BYTES = 1024 * 1024
"""Read of one file at a time; a longer line is cut."""
CLOSE_TIMEOUT_S = 2.0
STDOUT = 1
SUPERVISOR_FILE = "supervisor.log"
"""Its own file, whose lines it writes to stdout itself."""
MAX_TAIL_BYTES = 64 * 1024
SUPERVISOR = "supervisor"
STDERR = 2
"""Its name in every line; what it prints, a person may paste."""
GROUP_BORDER = " |+-"
"""The characters that `traceback` draws around the members of an exception group."""
CLOSING_REMARKS = ("Application startup failed. Exiting.",)
"""Lines that uvicorn logs after the error itself; they add nothing."""


def configure(level: str, *, json_lines: bool, process: str, to: TextIO | None = None) -> None:
    """Configure logging once per process, before anything logs.

    `level`: debug, info, warning or error. `process`: its name in every line. `to`: stderr unless
    something else is named.
    """
    logs.configure(level, json_lines=json_lines, process=process, to=to)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if process == SUPERVISOR:
        # The supervisor says which models are ready, and then an example that ends the output:
        # its watchdogs connect after that.
        logging.getLogger("engine.transport.client").setLevel(logging.WARNING)


def write_log_file(path: Path, *, json_lines: bool) -> None:
    """Append what this process logs to a file, too, which may be cut meanwhile."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logs.JsonFormatter(SUPERVISOR) if json_lines else logs.HumanFormatter())
    logging.getLogger().addHandler(handler)


def write_lines(lines: bytes) -> None:
    """Write whole lines where this process logs: to stderr, past Python's buffers."""
    os.write(STDERR, lines)


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


class CopiedLine(msgspec.Struct, frozen=True):
    """A line as a process wrote it. `name`: of its file, without an ending."""

    name: str
    text: bytes


class KeptLogs:
    """Keeps the files of HOME/logs below their bound and, if it `copies`, copies what is written
    there to a descriptor, from now on.

    Every child of the supervisor appends to a file of its own, so that no reader who is slow and no
    pipe that is full holds up a process that serves. `keep`: older files of each. `json_lines`: a
    line that is no JSON becomes the message of one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        keep: int,
        json_lines: bool,
        copies: bool,
        descriptor: int = STDOUT,
    ) -> None:
        self._folder, self._max_bytes, self._keep = folder, max_bytes, keep
        self._json, self._copies, self._descriptor = json_lines, copies, descriptor
        self._positions = {path: path.stat().st_size for path in folder.glob("*.log")}
        self._writer = logs.LineWriter[CopiedLine](
            self._encode, self._write, self._dropped, name="copy logs"
        )

    def cut(self) -> None:
        """Cut what has outgrown its bound."""
        for path in self._folder.glob("*.log"):
            if cut_log(path, self._max_bytes, self._keep):
                self._positions[path] = 0

    def cutting(self) -> Periodic:
        async def cut() -> None:
            if self._copies:
                self.copy()  # or what was written since would be cut unseen
            self.cut()

        return Periodic(
            "cut logs", CUT_INTERVAL_S, cut, log=log, failure="logs are not cut", at_once=False
        )

    def copying(self) -> Periodic:
        async def copy() -> None:
            self.copy()

        return Periodic(
            "copy logs", COPY_INTERVAL_S, copy, log=log, failure="logs are not copied to stdout"
        )

    def start(self) -> None:
        """Start the thread that writes what is copied."""
        self._writer.start()

    def close(self) -> None:
        """Write what is left. A reader of stdout that does not read is not waited for."""
        self.copy()
        self._writer.close(CLOSE_TIMEOUT_S)

    def copy(self) -> None:
        """Hand on the whole lines that were written since the last time."""
        for path in sorted(self._folder.glob("*.log")):
            if path.name != SUPERVISOR_FILE:
                for text in self._read(path):
                    self._writer.put(CopiedLine(path.stem, text))

    def _read(self, path: Path) -> list[bytes]:
        start = self._positions.get(path, 0)
        size = path.stat().st_size
        if size == start:
            return []
        with path.open("rb") as file:
            file.seek(start if start < size else 0)  # it was cut
            position = file.tell()
            data = file.read(MAX_READ_BYTES)
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) == MAX_READ_BYTES:
            end = len(data)
        self._positions[path] = position + end
        return data[:end].splitlines()

    def _encode(self, line: CopiedLine) -> bytes:
        if self._json and not line.text.startswith(b"{"):
            wrapped = {
                "time": logs.to_time(time.time()),
                "level": "info",
                "process": line.name,
                "logger": "output",
                "message": line.text.decode(errors="replace"),
            }
            return msgspec.json.encode(wrapped) + b"\n"
        return line.text + b"\n"

    def _write(self, lines: bytes) -> None:
        while lines:  # a pipe takes a part of what is longer than its buffer
            lines = lines[os.write(self._descriptor, lines) :]

    def _dropped(self, number: int) -> None:
        log.warning("%d lines of logs were not written to stdout, where nobody reads", number)


def cut_log(path: Path, max_bytes: int, keep: int) -> bool:
    """Empty a log that is being appended to and has outgrown `max_bytes`; its last `max_bytes` are
    kept beside it as NAME.1, and what stood there before up to NAME.`keep`. Returns whether it was
    cut."""
    if path.stat().st_size <= max_bytes:
        return False
    older = [path.with_name(f"{path.name}.{number}") for number in range(1, keep + 1)]
    for newer, oldest in zip(reversed(older[:-1]), reversed(older), strict=False):
        if newer.exists():
            newer.replace(oldest)
    with path.open("r+b") as current:
        if older:
            current.seek(-max_bytes, os.SEEK_END)
            with older[0].open("wb") as copy:
                while data := current.read(MAX_READ_BYTES):
                    copy.write(data)
        current.truncate(0)
    return True
