"""Runs the engine of an actor as a child process, here without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.processes.child_processes import Child, spawn
from gateway.processes.launching import engine_actor
from gateway.processes.launching.engine_actor import EngineActor
from gateway.settings.child_environment import launched_environment

SECRET = "tollgate_join_not-a-token"


async def test_an_engine_that_is_not_let_in_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    commands: list[Sequence[str]] = []

    def note_command(name: str, argv: Sequence[str], **options: Any) -> Child:
        commands.append(argv)
        return spawn(name, argv, **options)

    monkeypatch.setattr(engine_actor, "spawn", note_command)
    actor = EngineActor("penny")
    [folder] = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    await actor.begin(["--model", "models/penny"], "127.0.0.1:1", SECRET)
    assert (folder / "join.token").stat().st_mode & 0o777 == 0o600
    [command] = commands
    assert str(folder / "join.token") in command and SECRET not in " ".join(command)
    async with asyncio.timeout(60):
        assert "join.token" in await actor.left()
    assert SECRET not in (folder / "engine.log").read_text()
    await actor.end(5)
    assert not folder.exists()


def test_it_gets_no_variable_that_may_be_a_secret() -> None:
    here = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3", "HF_TOKEN": "x", "AWS_SECRET": "y"}
    assert launched_environment(here).keys() == {"PATH", "CUDA_VISIBLE_DEVICES", "HF_TOKEN"}
