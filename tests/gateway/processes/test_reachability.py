"""Configured databases that do not answer: one line, in time, with the setting and without the
password."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from gateway.processes import reachability
from gateway.processes.reachability import check_databases
from gateway.settings.file import SettingsError
from gateway.settings.load import load

SECRET = "hunter2"


async def refusal(name: str, url: str) -> str:
    with pytest.raises(SettingsError) as caught:
        await check_databases(load({}, {f"TOLLGATE_{name.upper()}": url}))
    assert SECRET not in str(caught.value)
    return str(caught.value)


async def test_what_answers_passes(postgres_url: str, redis_url: str) -> None:
    environ = {"TOLLGATE_DATABASE_URL": postgres_url, "TOLLGATE_REDIS_URL": redis_url}
    await check_databases(load({}, environ))
    await check_databases(load({}, {}))


@pytest.mark.parametrize(
    ("name", "url", "line"),
    [
        ("database_url", "postgresql://u:hunter2@127.0.0.1:1/d", "127.0.0.1:1: Connection refused"),
        ("database_url", "postgresql://u:hunter2@x.invalid/d", "x.invalid:5432: "),
        ("database_url", "postgresql://u:hunter2@/d?host=/nope", "/nope:5432: No such file"),
        ("database_url", "postgresql://u:hunter2@127.0.0.1:70000/d", "127.0.0.1:70000: not a "),
        ("database_url", "postgresql://u:hunter2@h/d?foo=1", "h:5432: not a usable URL: "),
        ("redis_url", "redis://:hunter2@127.0.0.1:1/0", "127.0.0.1:1: Connection refused"),
        ("redis_url", "redis://:hunter2@x.invalid/0", "x.invalid:6379: "),
        ("redis_url", "redis://:hunter2@h?foo=1", "h:6379: not a usable URL: "),
        ("redis_url", "unix:///nope/sock", "/nope/sock: No such file or directory"),
    ],
)
async def test_nobody_there(name: str, url: str, line: str) -> None:
    said = await refusal(name, url)
    assert said.startswith(f"{name} (TOLLGATE_{name.upper()}): {line}")


async def test_a_database_that_is_not_there_and_a_server_that_wants_a_password(
    postgres_url: str, redis_url: str
) -> None:
    missing = postgres_url.replace("@/test_", "@/absent_")
    assert missing != postgres_url
    said = await refusal("database_url", missing)
    assert "does not exist" in said
    said = await refusal("redis_url", redis_url.replace("unix://", f"unix://stranger:{SECRET}@"))
    assert "invalid username-password pair" in said


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("database_url", "postgresql://u:hunter2@127.0.0.1:{port}/d"),
        ("redis_url", "redis://:hunter2@127.0.0.1:{port}/0"),
    ],
)
async def test_one_that_takes_the_connection_and_says_nothing_is_given_up_on(
    name: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 1 <= reachability.REACH_TIMEOUT_S <= 30
    monkeypatch.setattr(reachability, "REACH_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        async with asyncio.timeout(60):
            said = await refusal(name, url.format(port=port))
    assert said.endswith(f": 127.0.0.1:{port}: no answer in 0.5 s")


@pytest.mark.parametrize(
    ("name", "url", "line"),
    [
        ("database_url", "postgresql://u:hunter2/d", "its port is not a number"),
        ("database_url", "postgresql://u:x@hunter2@h/d", "is written %40"),
        ("database_url", "http://u:hunter2@h/d", "Postgres only, not 'http'"),
        ("redis_url", "redis://:hunter2/x@h:1/0", "its port is not a number"),
        ("redis_url", "redis://:1/hunter2@h:1/0", "is written %2F"),
        ("redis_url", "http://:hunter2@h:1/0", "expected a URL such as 'redis://"),
    ],
)
def test_a_url_that_cannot_be_read_is_refused_before_any_attempt_and_not_quoted(
    name: str, url: str, line: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as caught:
        load({"home": tmp_path}, {f"TOLLGATE_{name.upper()}": url})
    assert name.upper() in str(caught.value).upper() and line in str(caught.value)
    assert SECRET not in str(caught.value)
