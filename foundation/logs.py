"""Formats what every process logs alike: one JSON object a line, or a line for a person.

A record is what was said, the process that says it, and the ids of the request it is about. Nothing
here reads a request but the trace that it names, so no prompt and no key slips in.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Generic, TextIO, TypeVar

import msgspec

from foundation.request_context import LOG_CONTEXT
from foundation.tasks import LogAndContinue

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING_LINES = 10_000
MAX_WRITE_BYTES = 4096
"""PIPE_BUF of Linux: a write up to that size is not mixed with another one (pipe(7))."""
WRITE_INTERVAL_S = 0.1
SLEEPS_AFTER_S = 2.0
"""A thread that writes lines sleeps after so long without one; until then nobody has to wake it."""


def to_time(seconds: float) -> str:
    """Write Unix seconds as logs do: UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, process; where it is about a request that and its
    trace, and the client's where that is another; logger, message, pid, and the exception if any.
    `process`: the name of this one."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": to_time(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
        }
        if (context := LOG_CONTEXT.get()) is not None:
            line |= {"request": context.request, "trace": context.trace}
            if theirs := context.client_trace:
                line["client_trace"] = theirs
        line |= {"logger": record.name, "message": record.getMessage(), "pid": record.process}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class HumanFormatter(logging.Formatter):
    """A line for a person: the time of day, then what was said, and the request it is about."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        context = LOG_CONTEXT.get()
        return line if context is None else f"{line} [{context.request}]"


def configure(level: str, *, json_lines: bool, process: str, to: TextIO | None = None) -> None:
    """Configure logging to stderr, or where else it is named, once per process, before anything
    logs.

    `level`: debug, info, warning or error. `process`: its name in every line.
    """
    handler = logging.StreamHandler(sys.stderr if to is None else to)
    handler.setFormatter(JsonFormatter(process) if json_lines else HumanFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def always(_item: object) -> bool:
    return True


class LineWriter(Generic[T]):
    """Writes lines in a thread of its own: who has one to write appends it and waits for nothing.

    `encode` makes a line, with its end, in that thread, once `is_ready` says so; `write` takes
    lines of at most `MAX_WRITE_BYTES`, or one longer one. What comes while `MAX_WAITING_LINES`
    wait, and what cannot be written (a full disk), is dropped, and `on_dropped` hears of how many
    in that thread.
    """

    def __init__(
        self,
        encode: Callable[[T], bytes],
        write: Callable[[bytes], object],
        on_dropped: Callable[[int], object],
        *,
        name: str,
        is_ready: Callable[[T], bool] = always,
    ) -> None:
        self._is_ready = is_ready
        self._encode, self._write, self._on_dropped = encode, write, on_dropped
        self._waiting: deque[T] = deque()
        self._ended = threading.Event()
        self._filled = threading.Event()
        self._sleeps = False
        """The thread waits for a line, and is to be told of one."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._num_refused = 0  # counted by who puts, told by who writes
        self._num_told = 0

    def start(self) -> None:
        self._thread.start()

    def put(self, item: T) -> None:
        """Append what becomes a line; called by one thread."""
        if len(self._waiting) < MAX_WAITING_LINES:
            self._waiting.append(item)
        else:
            self._num_refused += 1
        if self._sleeps:
            self._sleeps = False
            self._filled.set()

    def close(self, timeout_s: float) -> None:
        """Write what waits and end the thread, within `timeout_s`: a pipe that nobody reads keeps
        no process alive."""
        self._ended.set()
        self._filled.set()
        self._thread.join(timeout_s)

    def write_waiting(self, *, all_of_them: bool = True) -> None:
        """Write the lines that wait by now; unless `all_of_them`, those that are ready."""
        lines: list[bytes] = []
        for _ in range(len(self._waiting)):
            item = self._waiting.popleft()
            if all_of_them or self._is_ready(item):
                lines.append(self._encode(item))
            else:
                self._waiting.append(item)  # for the next time
        for batch in batches_of(lines):
            try:
                self._write(b"".join(batch))
            except OSError:
                self._on_dropped(len(batch))
        if num_refused := self._num_refused - self._num_told:
            self._num_told += num_refused
            self._on_dropped(num_refused)

    def _run(self) -> None:
        log_and_continue = LogAndContinue(log, "lines of a log are lost")
        empty_s = 0.0
        while not self._ended.wait(WRITE_INTERVAL_S):
            empty_s = 0.0 if self._waiting else empty_s + WRITE_INTERVAL_S
            if empty_s > SLEEPS_AFTER_S:
                self._sleep()
                empty_s = 0.0
            with log_and_continue:
                self.write_waiting(all_of_them=False)
        with log_and_continue:
            self.write_waiting()

    def _sleep(self) -> None:
        """Wait for a line. One that was put before its thread said that it sleeps is seen here, one
        that is put later wakes it: both threads write before they read what the other wrote."""
        self._filled.clear()
        self._sleeps = True
        if self._waiting:
            self._sleeps = False
        elif not self._ended.is_set():
            self._filled.wait()


def batches_of(lines: Sequence[bytes]) -> Iterable[list[bytes]]:
    """Join lines as they come to batches of at most `MAX_WRITE_BYTES`; a longer line is one."""
    batch: list[bytes] = []
    size = 0
    for line in lines:
        if batch and size + len(line) > MAX_WRITE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += len(line)
    if batch:
        yield batch
