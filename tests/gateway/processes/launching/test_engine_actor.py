"""Runs the engine of an actor as a child process, here without Ray."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.processes.launching.engine_actor import EngineActor
from gateway.settings.child_environment import launched_environment

SECRET = "tollgate_join_not-a-token"


async def test_an_engine_that_is_not_let_in_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    actor = EngineActor("penny")
    [folder] = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    await actor.begin(["--model", "models/penny"], "127.0.0.1:1", SECRET)
    assert (folder / "join.token").stat().st_mode & 0o777 == 0o600
    assert actor._engine is not None and actor._engine.child is not None
    command = Path(f"/proc/{actor._engine.child.pid}/cmdline").read_bytes()
    assert b"join.token" in command and SECRET.encode() not in command
    async with asyncio.timeout(60):
        assert "join.token" in await actor.left()
    assert SECRET not in (folder / "engine.log").read_text()
    await actor.end(5)
    assert not folder.exists()


def test_it_gets_no_variable_that_may_be_a_secret() -> None:
    here = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3", "HF_TOKEN": "x", "AWS_SECRET": "y"}
    assert launched_environment(here).keys() == {"PATH", "CUDA_VISIBLE_DEVICES", "HF_TOKEN"}
