"""One worker's process, as far as its own end goes; the rest of it is the journeys' to try."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from litestar.datastructures import State

from billing.spool.spool import Spool
from gateway import logs
from gateway.app import worker
from gateway.routes.asgi.request_metrics import ACCESS_LOG
from gateway.settings.load import SavedSettings, load
from tests.billing.samples import an_event


class Application:
    """An ASGI application with a spool, which breaks as soon as the application serves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.drained = 0
        self.state = State({"begin_drain": self.begin_drain, ACCESS_LOG: None})

    def begin_drain(self) -> None:
        self.drained += 1

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "lifespan"
        await receive()
        self.monkeypatch.setattr("billing.spool.sync._kernel", lambda: None)  # syncs in threads
        spool = await Spool.open(self.folder)
        self.state.services = SimpleNamespace(spool=spool, configuration=None, telemetry=None)
        await send({"type": "lifespan.startup.complete"})
        self.monkeypatch.setattr(os, "fdatasync", fail)
        await asyncio.gather(spool.close(an_event()), return_exceptions=True)
        await receive()
        await spool.shutdown()
        await send({"type": "lifespan.shutdown.complete"})


def fail(fd: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def never() -> SavedSettings:
    raise AssertionError("nobody asked for it")


def test_a_worker_whose_spool_breaks_drains_and_leaves_with_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Application(tmp_path / "spool", monkeypatch)
    monkeypatch.setattr(worker, "create_app", lambda *_, **__: app)
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)
    config = tmp_path / "tollgate.toml"
    config.write_text("stalled_reader_s = 7\n")
    with socket.socket() as listener, listener.dup() as same, pytest.raises(SystemExit) as left:
        listener.bind(("127.0.0.1", 0))
        try:
            worker.run(load({"config": config}, {}), listener, worker_id="w", read_again=never)
        finally:
            unread_ms = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert left.value.code == worker.BROKEN_SPOOL_STATUS
    assert app.drained == 1
    assert unread_ms == 7000
