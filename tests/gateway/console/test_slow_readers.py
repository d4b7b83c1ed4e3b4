"""Somebody who reads a page or the live tail slowly, or not at all, holds a bounded part of the
worker for a bounded time; others are served as before."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import uvicorn

from gateway.app.connection import ClientConnection
from gateway.audit.log import COMMAND_LINE
from gateway.auth.login.passwords import Passwords
from gateway.db import tenant
from gateway.net.listener import bound_unread
from gateway.request_log.writer import RequestLog
from gateway.tenancy.members.users import create_user
from gateway.tenancy.orgs import create_org
from gateway.tenancy.projects import create_project
from tests.gateway.console.server import PASSWORD, ConsoleServer, Organization
from tests.gateway.request_log.console_seeds import request_of

UNREAD_S = 0.5
SMALL_BYTES = 4096
"""The size of the kernel's buffers, on both sides of a connection."""
WAIT_S = 60.0

Sessions = Callable[[str, str], dict[str, str]]


@contextmanager
def impatient(console: ConsoleServer) -> Iterator[tuple[tuple[str, int], uvicorn.Server]]:
    """Serve the console on connections as a worker has them, but for less patience."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
        bound_unread(listener, UNREAD_S)
        protocol = ClientConnection.reading_within(UNREAD_S)
        config = uvicorn.Config(
            console.app, http=protocol, ws="none", lifespan="off", log_config=None
        )
        server = uvicorn.Server(config)

        async def start() -> asyncio.Task[None]:
            return asyncio.create_task(server.serve(sockets=[listener]))

        serving = console.call(start)
        try:
            yield listener.getsockname(), server
        finally:
            server.should_exit = True

            async def end() -> None:
                await serving

            console.call(end)


def ask(address: tuple[str, int], path: str, cookies: dict[str, str]) -> socket.socket:
    sent = "; ".join(f"{name}={value}" for name, value in cookies.items())
    asking = socket.socket()
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
    asking.settimeout(WAIT_S)
    asking.connect(address)
    asking.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nCookie: {sent}\r\n\r\n".encode())
    return asking


def read_to_the_end(asking: socket.socket, at_once: int) -> bytes:
    """Read until the server closes the connection, which a reset does, too."""
    found = b""
    try:
        while part := asking.recv(at_once):
            found += part
    except ConnectionResetError:
        pass
    return found


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_followed(console: ConsoleServer) -> bool:
    async def look() -> bool:
        return bool(console.services.live_tail.is_following)

    return console.call(look)


def new_organization(console: ConsoleServer) -> tuple[Organization, dict[str, str]]:
    """Return an organization of this test alone, which others do not count, and the cookies of its
    owner."""

    async def make() -> Organization:
        async with console.services.system_db.begin() as conn:
            org = await create_org(conn, name="slow", actor=COMMAND_LINE)
        async with tenant(console.services.system_db, org.id) as conn:
            project = await create_project(conn, org_id=org.id, name="web", actor=COMMAND_LINE)
            user = await create_user(
                conn,
                org_id=org.id,
                email="owner@slow.example",
                name="Owner",
                role="owner",
                actor=COMMAND_LINE,
                password_hash=await Passwords().hash(PASSWORD),
            )
        return Organization(name="slow", id=org.id, project_id=project.id, users={"owner": user.id})

    made = console.call(make)
    return made, console.session(made, "owner")


def answer_many(console: ConsoleServer, org: Organization) -> None:
    """Note some hundred requests, which come in to who watches."""

    async def answer() -> None:
        log = RequestLog(console.services.system_db, keep_days=30, on_dropped=lambda number: None)
        first = time.monotonic_ns() % 10**9
        for number in range(first, first + 300):
            log.put(request_of(org, ["key_live"], number))
        await log.flush()

    console.call(answer)


def test_who_does_not_read_the_live_tail_loses_the_place(
    console: ConsoleServer,
) -> None:
    org, cookies = new_organization(console)
    with ExitStack() as stack:
        address, server = stack.enter_context(impatient(console))
        url = f"http://{address[0]}:{address[1]}"
        other = stack.enter_context(httpx.Client(base_url=url, cookies=cookies, timeout=WAIT_S))
        asking = stack.enter_context(ask(address, "/console/requests/live", cookies))
        assert asking.recv(SMALL_BYTES).startswith(b"HTTP/1.1 200")
        until(lambda: is_followed(console))

        def has_lost_it() -> bool:
            answer_many(console, org)
            assert other.get("/console/requests").status_code == 200
            return not is_followed(console)

        until(has_lost_it)
        until(lambda: len(server.server_state.connections) <= 1)
        assert not read_to_the_end(asking, SMALL_BYTES).endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("path", ["/console/requests", "/console/usage?by=key"])
def test_who_reads_a_page_byte_by_byte_or_never_holds_up_nobody(
    console: ConsoleServer, sessions: Sessions, path: str
) -> None:
    cookies = sessions("much", "owner")
    with ExitStack() as stack:
        address, server = stack.enter_context(impatient(console))
        url = f"http://{address[0]}:{address[1]}"
        other = stack.enter_context(httpx.Client(base_url=url, cookies=cookies, timeout=WAIT_S))
        slow = [stack.enter_context(ask(address, path, cookies)) for _ in range(8)]
        whole = other.get(path)
        assert whole.status_code == 200 and len(whole.content) > 10 * SMALL_BYTES
        for each in slow[:4]:
            for _ in range(100):
                assert each.recv(1)
        assert other.get(path).status_code == 200
        until(lambda: len(server.server_state.connections) <= 1)
        for each in slow:
            assert len(read_to_the_end(each, 1024)) < len(whole.content)
