"""Every line of a log names the process and the request, and nobody waits for one to be written."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import threading
from contextvars import copy_context

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation import logs
from foundation.logs import MAX_WRITE_BYTES, HumanFormatter, JsonFormatter, LineWriter, batches_of
from foundation.periodic import Periodic
from foundation.request_context import LOG_CONTEXT, LogContext

REQUEST = "req_01890000000070008000000000000000"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01".encode()


def said_in(context: LogContext | None, formatter: logging.Formatter) -> str:
    record = logging.LogRecord("gateway.x", logging.WARNING, "f", 1, "lost %s", ("it",), None)

    def say() -> str:
        LOG_CONTEXT.set(context)
        return formatter.format(record)

    return copy_context().run(say)


def test_a_line_names_the_process_and_the_request_it_is_about() -> None:
    sent = LogContext(REQUEST, [(b"authorization", b"Bearer x"), (b"traceparent", TRACEPARENT)])
    read = json.loads(said_in(sent, JsonFormatter("worker-0")))
    assert (read["process"], read["request"], read["trace"]) == ("worker-0", REQUEST, TRACE)
    assert (read["level"], read["message"]) == ("warning", "lost it")
    assert said_in(sent, HumanFormatter()).endswith(f" lost it [{REQUEST}]")


def test_a_request_without_a_trace_begins_one_of_its_own_id() -> None:
    read = json.loads(said_in(LogContext(REQUEST), JsonFormatter()))
    assert read["trace"] == REQUEST.removeprefix("req_")


def test_a_line_about_no_request_names_none() -> None:
    assert {"request", "trace"}.isdisjoint(json.loads(said_in(None, JsonFormatter())))
    assert said_in(None, HumanFormatter()).endswith(" lost it")


async def test_a_task_logs_for_the_request_that_made_it_and_repeated_work_for_none() -> None:
    seen: list[LogContext | None] = []
    done = asyncio.Event()

    async def look() -> None:
        seen.append(LOG_CONTEXT.get())
        done.set()

    async def serve() -> Periodic:
        LOG_CONTEXT.set(LogContext(REQUEST))
        await asyncio.create_task(look())
        done.clear()
        periodic = Periodic("look", 3600, look, log=logging.getLogger("x"), failure="not seen")
        periodic.start()
        return periodic

    periodic = await asyncio.create_task(serve())
    await done.wait()
    await periodic.close()
    assert seen[0] is not None
    assert seen[0].request == REQUEST
    assert seen[1] is None


@given(st.lists(st.binary(min_size=1, max_size=MAX_WRITE_BYTES + 10), max_size=12))
def test_lines_are_joined_in_order_and_a_write_is_of_whole_lines(lines: list[bytes]) -> None:
    joined = list(batches_of(lines))
    assert [line for batch in joined for line in batch] == lines
    assert all(len(batch) == 1 or sum(map(len, batch)) <= MAX_WRITE_BYTES for batch in joined)


def test_a_line_that_is_not_ready_waits_for_the_next_time() -> None:
    written: list[bytes] = []
    ready: list[bytes] = [b"b"]
    writer = LineWriter[bytes](
        bytes, written.append, written.append, name="lines", is_ready=ready.__contains__
    )
    for line in (b"a", b"b"):
        writer.put(line)
    writer.write_waiting(all_of_them=False)
    assert written == [b"b"]
    ready.append(b"a")
    writer.write_waiting(all_of_them=False)
    assert written == [b"b", b"a"]
    writer.put(b"c")
    writer.write_waiting()
    assert written[-1] == b"c"


def test_a_full_disk_loses_lines_and_says_how_many() -> None:
    written: list[bytes] = []

    def write(lines: bytes) -> None:
        if not written:
            written.append(b"")
            raise OSError(errno.ENOSPC, "no space")
        written.append(lines)

    dropped: list[int] = []
    writer = LineWriter[bytes](bytes, write, dropped.append, name="lines")
    writer.put(b"lost\n")
    writer.write_waiting()
    writer.put(b"kept\n")
    writer.write_waiting()
    assert (written, dropped) == ([b"", b"kept\n"], [1])


def test_a_pipe_that_nobody_reads_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING_LINES", 3)
    monkeypatch.setattr(logs, "WRITE_INTERVAL_S", 0.0)
    stuck, let_go, told = threading.Event(), threading.Event(), threading.Event()
    dropped: list[int] = []

    def write(lines: bytes) -> None:
        stuck.set()
        let_go.wait()

    def hear(number: int) -> None:
        dropped.append(number)
        told.set()

    writer = LineWriter[bytes](bytes, write, hear, name="lines")
    writer.start()
    writer.put(b"first\n")
    assert stuck.wait(60)
    for _ in range(5):
        writer.put(b"more\n")
    writer.close(timeout_s=0)  # returns though the thread is still stuck
    let_go.set()
    assert told.wait(60)
    assert dropped == [2]
