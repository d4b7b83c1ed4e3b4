"""The socket of a home: its own user asks there, and bad requests are answered."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import msgspec
import pytest

from gateway.home import Home
from gateway.processes import control_socket as module
from gateway.processes.control_socket import (
    NoSupervisor,
    ReloadAnswer,
    ReloadRequest,
    Tell,
    ask,
    control_socket,
)
from tests.scratch import make_scratch

DRY = ReloadRequest(is_dry_run=True)


async def echo(request: ReloadRequest, tell: Tell) -> ReloadAnswer:
    tell("first")
    tell("then")
    return ReloadAnswer(changes=["~ a"] * 10_000, message=str(request.is_dry_run))


@pytest.fixture(params=["short", "long" * 30])
def home(request: pytest.FixtureRequest) -> Home:
    found = Home(make_scratch() / request.param)
    found.create()
    return found


async def test_a_command_gets_an_answer(home: Home) -> None:
    async with control_socket(home, echo):
        path: Path = home.control_socket
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        told: list[str] = []
        found = await ask(home, DRY, told.append)
        assert told == ["first", "then"]
        assert found.message == "True" and len(found.changes) == 10_000
    assert not path.exists()
    with pytest.raises(NoSupervisor, match="no `tollgate up` runs"):
        await ask(home, DRY, print)


@pytest.mark.parametrize(
    "sent", [b'{"is_dry_run":1}\n', b"nonsense\n", b"x" * 100_000 + b"\n", b'{"type":"a"}\n']
)
async def test_what_is_no_request_is_said_so(home: Home, sent: bytes) -> None:
    async with control_socket(home, echo):
        reader, writer = await asyncio.open_unix_connection(home.control_socket)
        writer.write(sent)
        found = msgspec.json.decode(await reader.readline(), type=ReloadAnswer)
        assert found.is_refused and found.message.startswith("not a request: ")
        writer.close()
        assert (await ask(home, DRY, print)).message == "True"


async def test_who_says_nothing_is_not_waited_for(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.01)
    async with control_socket(home, echo):
        reader, writer = await asyncio.open_unix_connection(home.control_socket)
        assert b"no request came" in await reader.readline()
        writer.close()


async def test_a_supervisor_that_ends_amid_an_answer_is_said_so(home: Home) -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    home.control_socket.parent.mkdir(exist_ok=True)
    server = await asyncio.start_unix_server(leave, home.control_socket)
    with pytest.raises(NoSupervisor, match="gave no answer"):
        await ask(home, DRY, print)
    server.close()
