"""Clients that hold on to what they got: thousands of idle connections, heads and bodies that come
a byte a second, readers of a byte a second. Each is bounded in memory and in time, and nobody else
notices."""

from __future__ import annotations

import asyncio
import json
import resource
import select
import socket
import statistics
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from gateway.app.connection import (
    BODY_TIMEOUT_S,
    HEAD_TIMEOUT_S,
    OTHER_FILES,
    SPARE_CONNECTIONS,
)
from tests.chaos.load import check_books, client
from tests.stack import Stack, running

pytestmark = pytest.mark.slow

WANTED_CONNECTIONS = 5000
OWN_FILES = 500
"""Descriptors that this process needs besides its connections."""
MAX_IDLE_BYTES = 16 * 1024
"""Memory that an idle connection may cost a worker, including its last request's head."""
LORISES = 100
"""There are this many that send their heads slowly, and as many with slow bodies."""
LATE_S = 30.0
SERVED_WITHIN_S = 1.0
STALLED_READER_S = 5.0
SLOW_READERS = 24
MAX_READERS_BYTES = 64 * 1024 * 1024
PROBES = 15
LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(config=f"stalled_reader_s = {STALLED_READER_S}\n") as started:
        yield started


@pytest.fixture
def num_connections() -> Iterator[int]:
    """At least as many as are wanted; skipped where this machine lets one process open fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = WANTED_CONNECTIONS + max(OWN_FILES, OTHER_FILES + SPARE_CONNECTIONS)
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"RLIMIT_NOFILE is {hard}: {WANTED_CONNECTIONS} connections need {needed}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield WANTED_CONNECTIONS
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def worker_of(stack: Stack) -> psutil.Process:
    (pid,) = stack.pids("gateway", "worker")
    return psutil.Process(pid)


async def latencies_s(http: httpx.AsyncClient) -> list[float]:
    """Measure small requests, one after the other."""
    found = []
    for number in range(PROBES):
        request = {
            "model": "penny",
            "messages": [{"role": "user", "content": f"Hello {number}"}],
            "max_tokens": 1,
        }
        began = time.monotonic()
        answer = await http.post("/v1/chat/completions", json=request)
        assert answer.status_code == 200, answer.text
        found.append(time.monotonic() - began)
    return found


def check_undisturbed(before: list[float], during: list[float]) -> None:
    """Beyond the noise of a machine that does other things, too."""
    assert statistics.median(during) < 2 * statistics.median(before) + 0.1
    assert sorted(during)[-2] < max(SERVED_WITHIN_S, 3 * max(before)), "one may meet a pause"


def idle_connections(port: int, number: int) -> list[socket.socket]:
    """Every other one has been answered once."""
    opened = []
    for place in range(number):
        opened.append(socket.create_connection(("127.0.0.1", port), timeout=10))
        if place % 2:
            opened[-1].sendall(LIVE)
            answer = b""
            while not answer.endswith(b'{"status":"alive"}'):
                answer += (got := opened[-1].recv(4096))
                assert got, answer
    return opened


def closed_among(connections: list[socket.socket]) -> int:
    poll = select.poll()
    for each in connections:
        poll.register(each, select.POLLIN)
    return len(poll.poll(0))


async def slow_loris(port: int, start: bytes) -> tuple[bytes, float]:
    """A byte a second behind `start` until the server has enough: what it says, and when."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.monotonic()
    writer.write(start)
    answer = asyncio.create_task(reader.read())
    try:
        while not (await asyncio.wait([answer], timeout=1.0))[0]:
            writer.write(b"a")
        return await answer, time.monotonic() - began
    finally:
        writer.close()


@pytest.mark.nightly
async def test_thousands_of_idle_connections_and_slow_requests_disturb_nobody(
    stack: Stack, num_connections: int
) -> None:
    worker = worker_of(stack)
    authorised = b"authorization: Bearer %b\r\n" % stack.credentials["api_key"].encode()
    async with client(stack) as http:
        before = await latencies_s(http)
        rss = worker.memory_info().rss
        idle = await asyncio.to_thread(idle_connections, stack.port, num_connections)
        cost = (worker.memory_info().rss - rss) / num_connections
        print(f"{num_connections} idle connections of {cost / 1024:.1f} KiB")
        assert cost < MAX_IDLE_BYTES
        heads = [slow_loris(stack.port, POST + b"x: ") for _ in range(LORISES)]
        long = authorised + b"content-length: 100000\r\n\r\n{"
        bodies = [slow_loris(stack.port, POST + long) for _ in range(LORISES)]
        slow = asyncio.gather(*heads, *bodies)
        await asyncio.sleep(2)
        assert closed_among(idle) == 0
        check_undisturbed(before, await latencies_s(http))
        answers = await slow
    for number, (answer, took_s) in enumerate(answers):
        assert answer.startswith(b"HTTP/1.1 408 "), answer[:200]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        timeout_s = HEAD_TIMEOUT_S if number < LORISES else BODY_TIMEOUT_S
        assert timeout_s - 1 < took_s < timeout_s + LATE_S
    silent, answered = idle[::2], idle[1::2]
    async with asyncio.timeout(HEAD_TIMEOUT_S + LATE_S):  # who says nothing is not kept
        while closed_among(silent) < len(silent):
            await asyncio.sleep(0.5)
    assert closed_among(answered) == 0, "who was answered has longer for the next request"
    for each in idle:
        each.close()
    stack.wait("all are gone", lambda: len(worker.net_connections("tcp")) < 10)


async def read_slowly(stack: Stack) -> None:
    """A byte a second of an answer that is far larger than all buffers."""
    request = {
        "model": "penny",
        "messages": [{"role": "user", "content": "Tell me everything."}],
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 20,
    }
    content = json.dumps(request).encode()
    head = b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", stack.port))
        key = stack.credentials["api_key"].encode()
        await loop.sock_sendall(connection, POST + head % (key, len(content)) + content)
        try:
            while await loop.sock_recv(connection, 1):
                await asyncio.sleep(1)
        except ConnectionError:
            return  # given up


@pytest.mark.nightly
async def test_readers_of_a_byte_a_second_are_given_up_and_disturb_nobody(stack: Stack) -> None:
    worker = worker_of(stack)
    async with client(stack) as http:
        before = await latencies_s(http)
        num_sockets, rss = len(worker.net_connections("tcp")), worker.memory_info().rss
        readers = [asyncio.create_task(read_slowly(stack)) for _ in range(SLOW_READERS)]
        await asyncio.sleep(STALLED_READER_S * 0.6)
        check_undisturbed(before, await latencies_s(http))
        assert worker.memory_info().rss - rss < MAX_READERS_BYTES
        await asyncio.to_thread(
            stack.wait_metric, "tollgate_num_requests_running", 0, timeout_s=4 * STALLED_READER_S
        )
        await asyncio.to_thread(
            stack.wait,
            "their connections are gone",
            lambda: len(worker.net_connections("tcp")) <= num_sockets,
            4 * STALLED_READER_S,
        )
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    stack.wait_metric("tollgate_kv_cache_usage_perc", 0)
    stack.wait("leases are settled", lambda: stack.open_leases() == 0)
    stack.wait_metric("tollgate_spool_backlog_events", 0, timeout_s=60)
    rows = await stack.sql("SELECT output FROM usage_events WHERE finish = 'disconnect'")
    assert len(rows) == SLOW_READERS and all(0 < row.output < 3000 for row in rows)
    await check_books(stack)
