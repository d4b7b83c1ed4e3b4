"""Fixture servers and bridges as processes of their own, and how they are asked without an SDK."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import msgspec

from foundation import sse

MODERN, LEGACY = "2026-07-28", "2025-11-25"
ERAS = (LEGACY, MODERN)
ACCEPT = {"accept": "application/json, text/event-stream"}
STOP_S = 30.0
ALL = {"elicitation": {}, "sampling": {}, "roots": {}}


class Process:
    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.url = f"http://127.0.0.1:{port}/mcp"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(STOP_S)


def start(package: str, module: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", f"{package}.{module}", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@contextmanager
def running(
    *commands: tuple[str, ...], package: str = "tests.mcp_bridge"
) -> Iterator[list[Process]]:
    """All at once, until they say that they listen; ended with it. `package`: of their modules."""
    started: list[subprocess.Popen[str]] = []
    try:
        started.extend(start(package, *command) for command in commands)
        yield [Process(process, listening_port(process)) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
        for process in started:
            process.wait(STOP_S)
            if process.stdout is not None:
                process.stdout.close()


def listening_port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    said = process.stdout.readline().split()
    assert said[:2] == ["listening", "on"], said
    return int(said[2])


class Eras:
    """One of everything for servers of one era: the server, and two workers of one bridge."""

    def __init__(self, server: Process, workers: tuple[Process, Process], redis_url: str) -> None:
        self.server, self.redis_url = server, redis_url
        self.first, self.second = workers


def modern(
    method: str,
    params: dict[str, Any] | None = None,
    *,
    capabilities: dict[str, Any] | None = None,
    id: int = 1,
) -> tuple[dict[str, Any], dict[str, str]]:
    """A request, and its headers."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientCapabilities": ALL if capabilities is None else capabilities,
    }
    given = {**(params or {}), "_meta": meta}
    headers = {**ACCEPT, "mcp-protocol-version": MODERN, "mcp-method": method}
    name = given.get("name", given.get("uri"))
    if name is not None:
        headers["mcp-name"] = name
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": given}, headers


async def ask_modern(
    client: httpx.AsyncClient, url: str, method: str, params: Any = None, **more: Any
) -> dict[str, Any]:
    """Return what is answered in the end."""
    caller = more.pop("caller", "alice")
    message, headers = modern(method, params, **more)
    answer = await client.post(url, json=message, headers={**headers, "x-caller": caller})
    return last_of(answer)


def last_of(answer: httpx.Response) -> dict[str, Any]:
    return messages_of(answer)[-1]


def messages_of(answer: httpx.Response) -> list[dict[str, Any]]:
    if answer.headers["content-type"].startswith("application/json"):
        return [answer.json()]
    events = sse.EventParser(2**24, with_ids=True).feed(answer.content)
    return [msgspec.json.decode(event.data) for event in events if event.data]


class LegacyClient:
    """A session, at whichever worker is asked."""

    def __init__(self, http: httpx.AsyncClient, id: str, caller: str, version: str) -> None:
        self.http, self.id = http, id
        self.headers = {
            **ACCEPT,
            "mcp-session-id": id,
            "mcp-protocol-version": version,
            "x-caller": caller,
        }

    @classmethod
    async def open(
        cls,
        http: httpx.AsyncClient,
        url: str,
        *,
        caller: str = "alice",
        version: str = LEGACY,
        capabilities: dict[str, Any] | None = None,
    ) -> LegacyClient:
        params = {
            "protocolVersion": version,
            "capabilities": ALL if capabilities is None else capabilities,
            "clientInfo": {"name": "test", "version": "1"},
        }
        message = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        answer = await http.post(url, json=message, headers={**ACCEPT, "x-caller": caller})
        assert answer.status_code == 200, answer.text
        found = cls(http, answer.headers["mcp-session-id"], caller, version)
        said = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert (await found.send(url, said)).status_code == 202
        return found

    async def send(self, url: str, message: dict[str, Any]) -> httpx.Response:
        return await self.http.post(url, json=message, headers=self.headers)

    async def ask(self, url: str, method: str, params: Any = None, id: int = 1) -> dict[str, Any]:
        message = {"jsonrpc": "2.0", "id": id, "method": method, "params": params or {}}
        return last_of(await self.send(url, message))

    @asynccontextmanager
    async def stream(
        self, url: str, method: str, params: Any, id: int = 1
    ) -> AsyncIterator[AsyncIterator[tuple[str | None, Any]]]:
        """Its events as they come: ids and messages, None for one that is no message."""
        message = {"jsonrpc": "2.0", "id": id, "method": method, "params": params}
        async with self.http.stream("POST", url, json=message, headers=self.headers) as answer:
            yield events_of(answer)

    @asynccontextmanager
    async def listen(
        self, url: str, last: str | None = None
    ) -> AsyncIterator[AsyncIterator[tuple[str | None, Any]]]:
        headers = self.headers if last is None else {**self.headers, "last-event-id": last}
        async with self.http.stream("GET", url, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            yield events_of(answer)


async def events_of(answer: httpx.Response) -> AsyncIterator[tuple[str | None, Any]]:
    decoder = sse.EventParser(2**24, with_ids=True)
    async for chunk in answer.aiter_bytes():
        for event in decoder.feed(chunk):
            yield event.id, msgspec.json.decode(event.data) if event.data else None


async def asked_on(events: AsyncIterator[tuple[str | None, Any]]) -> tuple[str, dict[str, Any]]:
    """The next that a server asks on a stream, and the id of the event before it."""
    before = ""
    async for id_, message in events:
        if message is not None and "method" in message and "id" in message:
            return before, message
        before = id_ or before
    raise AssertionError("the stream ended, and nothing was asked")


async def answered_on(events: AsyncIterator[tuple[str | None, Any]], id: int = 1) -> dict[str, Any]:
    async for _, message in events:
        if message is not None and message.get("id") == id and "method" not in message:
            found: dict[str, Any] = message
            return found
    raise AssertionError("the stream ended without an answer")
