"""The socket in the home on which `tollgate up` takes requests of commands: a line of JSON. Back
come lines of what it does meanwhile, and the answer. Only its own user reaches it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from gateway.home import Home, make_private

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 4 * 1024 * 1024
REQUEST_TIMEOUT_S = 10.0
"""Bounds the wait for a request's line; an answer may take as long as an engine takes to load."""


class ReloadRequest(msgspec.Struct, frozen=True, kw_only=True, tag="reload"):
    """A request to read the settings again."""

    is_dry_run: bool = False
    """Only say what would change."""
    replaces_workers: bool = False
    """Replace the workers in any case: for another version of the program, or a new secret."""
    stops_first: bool = False
    """Stop engines that are replaced before the new ones start: for memory that has no room for
    both. Nobody serves their models meanwhile."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A line for people of what is done meanwhile."""

    line: str


class ReloadAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The outcome of a reload."""

    is_refused: bool = False
    changes: list[str] = []
    """Lines for people, each a change."""
    message: str
    """A line for people."""


class NoSupervisor(Exception):
    """An error of a command that needs a running `tollgate up`."""


Tell = Callable[[str], None]
"""Shows a person a line."""
Answer = Callable[[ReloadRequest, Tell], Awaitable[ReloadAnswer]]


@asynccontextmanager
async def control_socket(home: Home, answer: Answer) -> AsyncIterator[None]:
    """Take requests for as long as the context is open. Raises: OSError, PermissionError."""
    path = home.control_socket
    if path.parent != home.run:
        make_private(path.parent, os.geteuid(), os.getegid())
    path.unlink(missing_ok=True)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def tell(line: str) -> None:
            if not writer.is_closing():  # whoever asked may be gone: what was begun goes on
                writer.write(msgspec.json.encode(Progress(line)) + b"\n")

        with suppress(ConnectionError):
            try:
                found = await _answered(reader, answer, tell)
                writer.write(msgspec.json.encode(found) + b"\n")
                await writer.drain()
            finally:
                writer.close()

    before = os.umask(0o177)
    try:
        server = await asyncio.start_unix_server(serve, path, limit=MAX_REQUEST_BYTES)
    finally:
        os.umask(before)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


async def _answered(reader: asyncio.StreamReader, answer: Answer, tell: Tell) -> ReloadAnswer:
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            line = await reader.readuntil(b"\n")
        request = msgspec.json.decode(line, type=ReloadRequest)
    except TimeoutError:
        return ReloadAnswer(is_refused=True, message="no request came")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, msgspec.MsgspecError) as error:
        return ReloadAnswer(is_refused=True, message=f"not a request: {error}")
    return await answer(request, tell)


async def ask(home: Home, request: ReloadRequest, tell: Tell) -> ReloadAnswer:
    """Ask the `tollgate up` of a home; `tell` is given the lines that come meanwhile. Raises:
    NoSupervisor."""
    path: Path = home.control_socket
    nobody = f"no `tollgate up` runs for {home.root}"
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=MAX_ANSWER_BYTES)
    except OSError as error:
        raise NoSupervisor(f"{nobody} ({error.strerror or type(error).__name__})") from None
    try:
        writer.write(msgspec.json.encode(request) + b"\n")
        while True:
            line = await reader.readuntil(b"\n")
            said = msgspec.json.decode(line, type=Progress | ReloadAnswer)
            if isinstance(said, ReloadAnswer):
                return said
            tell(said.line)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise NoSupervisor(f"{home.root}: `tollgate up` gave no answer: it has ended") from error
    finally:
        writer.close()
