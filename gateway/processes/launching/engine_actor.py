"""Keeps one engine running on a node of Ray, as a child process that is started again when it dies.

Nothing that it computes passes through Ray. Imports no Ray: who launches it makes it an actor.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gateway.logs import KeptLogs, last_error
from gateway.processes.child_processes import Child, spawn
from gateway.processes.restarter import Restarter
from gateway.settings.child_environment import launched_environment
from gateway.settings.load import own_environment

CANNOT_START = 2
"""The exit status of an engine that cannot start as configured, or that is not let in."""
LOG_BYTES = 8 * 1024 * 1024


class EngineActor:
    """An engine on this node. The folder of its token, key and log goes with it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._folder = Path(tempfile.mkdtemp(prefix="tollgate-engine-"))
        self._token = self._folder / "join.token"
        self._engine: Restarter | None = None
        self._logs = KeptLogs(
            self._folder, max_bytes=LOG_BYTES, keep=1, json_lines=True, copies=True
        )
        self._chores = (self._logs.copying(), self._logs.cutting())
        self._left = asyncio.Event()

    async def host(self) -> str:
        """Return the name of this node; it answers once the actor runs."""
        return socket.gethostname()

    async def begin(self, arguments: Sequence[str], home: str, token: str) -> None:
        """Start an engine that joins `home` (HOST:PORT) by a token, and keep it running. Raises:
        OSError."""
        os.close(os.open(self._token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        self._token.write_text(token)
        self._logs.start()
        for each in self._chores:
            each.start()
        self._engine = Restarter("engine", lambda: self._start(arguments, home))
        self._engine.is_final = lambda status: status == CANNOT_START
        self._engine.on_exit = self._note_exit
        await self._engine.begin()

    async def left(self) -> str:
        """Wait until the engine has left for good, and return why."""
        await self._left.wait()
        assert self._engine is not None
        last = self._engine.last_exit
        return "it was ended" if last is None else last_error(last.log, last.log_start)

    async def end(self, timeout_s: float) -> None:
        """End the engine, which has `timeout_s` for what it runs."""
        if self._engine is not None:
            await self._engine.stop(timeout_s)
            for each in self._chores:
                await each.close()
            self._logs.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _note_exit(self, child: Child) -> None:
        if child.poll() == CANNOT_START:
            self._left.set()

    async def _start(self, arguments: Sequence[str], home: str) -> Child:
        return spawn(
            "engine",
            [
                *(sys.executable, "-m", "engine", *arguments, "--join", home),
                *("--token", str(self._token), "--identity", str(self._folder / "identity")),
            ],
            run=self._folder,
            log=self._folder / "engine.log",
            env=launched_environment(own_environment()),
        )
