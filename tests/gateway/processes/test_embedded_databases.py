"""The embedded servers: as root in a folder nobody else may enter, as an ordinary user, across a
kill -9, on a path too long for a socket, and two migrations at once."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest
import redis.asyncio
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db import create_engine
from gateway.home import MAX_SOCKET_PATH_BYTES, Home, HomeLock, make_private, socket_folder
from gateway.processes import credentials_file as credentials
from gateway.processes import embedded_databases as embedded
from gateway.processes.child_processes import end_leftovers
from gateway.secret import Secret
from migrations.runner import migrate
from tests.budget import NIGHT
from tests.scratch import make_scratch

AS_ROOT = os.geteuid() == 0
NOBODY = 65534
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Pytest's own folders are too long for a socket."""
    made = make_scratch()
    yield made
    shutil.rmtree(made)


async def start_both_and_stop(home: Home) -> list[int]:
    """Write to both, stop, start again, read; returns the pids that ran."""
    pids = []
    for seen in (False, True):
        postgres, valkey = await asyncio.gather(
            embedded.start_postgres(home), embedded.start_redis(home)
        )
        pids += [postgres.pid, valkey.pid]
        engine = create_engine(embedded.postgres_url(home))
        client = redis.asyncio.from_url(embedded.redis_url(home))
        async with engine.begin() as connection:
            if not seen:
                await connection.execute(text("CREATE TABLE kept AS SELECT 42 AS answer"))
                await client.set("kept", "42")
            assert await connection.scalar(text("SELECT answer FROM kept")) == 42
            assert await connection.scalar(text("SHOW fsync")) == "on"
        assert await client.get("kept") == b"42"
        await client.aclose()
        await engine.dispose()
        assert [await postgres.stop(20), await valkey.stop(20)] == [0, 0]
    return pids


async def test_data_outlives_a_restart_and_no_process_does(folder: Path) -> None:
    home = Home(folder / "home")
    home.create()
    pids = await start_both_and_stop(home)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert list(home.run.glob("*.pid")) == []


@pytest.mark.skipif(not AS_ROOT, reason="only root can close a folder to nobody")
async def test_as_root_in_a_folder_that_nobody_cannot_enter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # The programs too, as in a checkout or a tool of uv under /root.
    installed = embedded.postgres_bin()
    for part in (installed.parents[1], installed.parents[1].with_suffix(".libs")):
        shutil.copytree(part, folder / part.name)
    there = folder.joinpath(*installed.parts[-3:])
    monkeypatch.setattr(embedded, "postgres_bin", lambda: there)
    home = Home(folder / "inner")
    home.create()
    runner = embedded.who_runs(home.postgres, embedded.postgres_bin() / "postgres")
    assert "--ambient-caps=+dac_override" in runner.credentials
    await start_both_and_stop(home)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert home.postgres.stat().st_uid == runner.uid in embedded.SERVER_IDS
    assert stat.S_IMODE(home.postgres.stat().st_mode) == 0o700


@pytest.mark.skipif(not AS_ROOT, reason="only root can give a privilege away")
def test_root_keeps_no_privilege_for_servers_that_do_not_need_it(folder: Path) -> None:
    folder.chmod(0o755)
    home = Home(folder / "home")
    home.create()
    assert stat.S_IMODE(home.root.stat().st_mode) == 0o711
    for private in (home.run, home.logs, home.spool):
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
    runner = embedded.who_runs(home.postgres, Path("/bin/sh"))
    assert runner.uid in embedded.SERVER_IDS
    assert not [option for option in runner.credentials if "caps" in option]
    credentials.write(
        home.credentials,
        credentials.Credentials(base_url="http://x/v1", api_key="k", admin_key="a"),
    )
    Secret.load_or_create(home.secret)
    HomeLock.acquire(home).release()
    files = home.credentials, home.secret, home.lock
    become = ["setpriv", *runner.credentials, "--", "/bin/sh", "-c"]
    for reach in ("ls $1", "cd $1/run", *(f"cat $1/{file.name}" for file in files)):
        tried = subprocess.run([*become, reach, "sh", str(home.root)], capture_output=True)
        assert b"ermission denied" in tried.stderr or b"can't cd" in tried.stderr, reach


INTRUDER = """
import os, socket, sys
home, pids, doors = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
reached = []
def attempt(what, act):
    try:
        act()
    except PermissionError:
        return
    reached.append(what)
os.stat(f"{home}/postgres")  # it may pass through the home, or this shows nothing
for folder in ("postgres", "redis"):
    attempt(folder, lambda: os.listdir(f"{home}/{folder}"))
for door in doors:
    attempt(door, lambda: socket.socket(socket.AF_UNIX).connect(door))
for pid in pids:
    attempt("signal", lambda: os.kill(int(pid), 0))
    attempt("working folder", lambda: os.listdir(f"/proc/{pid}/cwd"))
print(reached)
"""
"""A script that tries, as user nobody, what must be denied; it prints each attempt that succeeds.
"""


@pytest.mark.skipif(not AS_ROOT, reason="only root can become somebody else")
@pytest.mark.parametrize("name", ["home", "long" * (MAX_SOCKET_PATH_BYTES // 4)])
async def test_what_runs_as_nobody_cannot_reach_the_servers_of_root(
    folder: Path, name: str
) -> None:
    folder.chmod(0o755)
    home = Home(folder / name)
    home.create()
    postgres = await embedded.start_postgres(home, durable=False)
    valkey = await embedded.start_redis(home, durable=False)
    doors = (
        socket_folder(home.postgres, ".s.PGSQL.5432") / ".s.PGSQL.5432",
        socket_folder(home.redis, "redis.sock") / "redis.sock",
    )
    assert [stat.S_ISSOCK(door.stat().st_mode) for door in doors] == [True, True]
    arguments = [str(home.root), f"{postgres.pid},{valkey.pid}", ",".join(map(str, doors))]
    try:
        tried = subprocess.run(
            [sys.executable, "-c", INTRUDER, *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    finally:
        await asyncio.gather(postgres.stop(20), valkey.stop(20))
        for door in doors:
            if not door.is_relative_to(home.root):
                shutil.rmtree(door.parent)
    assert (tried.stdout, tried.stderr) == ("[]\n", "")


@pytest.mark.skipif(not AS_ROOT, reason="only root changes owners")
async def test_data_that_was_nobodys_or_was_copied_back_is_taken_over(folder: Path) -> None:
    home = Home(folder / "home")
    home.create()
    await start_both_and_stop(home)
    for owner in (NOBODY, 0):
        for data in (home.postgres, home.redis):
            for path in (data, *data.rglob("*")):
                os.chown(path, owner, owner)
        child = await embedded.start_postgres(home)
        connection = await asyncpg.connect(embedded.postgres_url(home).replace("+asyncpg", "", 1))
        assert await connection.fetchval("SELECT answer FROM kept") == 42
        await connection.close()
        await child.stop(20)
        valkey = await embedded.start_redis(home)
        await valkey.stop(20)
    os.chown(home.redis, 4321, 4321)
    with pytest.raises(PermissionError, match="mode 0700"):
        await embedded.start_redis(home)


@pytest.mark.skipif(not AS_ROOT, reason="only root makes a home that others pass through")
def test_a_home_that_was_there_keeps_its_mode(folder: Path) -> None:
    home = Home(folder)
    home.create()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


AS_SOMEBODY = """
import asyncio, os, sys
uid = int(sys.argv[2])
import gateway.cli.shared.administration, sqlalchemy.dialects.postgresql.asyncpg
from tests.gateway.processes.test_embedded_databases import start_both_and_stop
from gateway.home import Home
asyncio.run(asyncio.sleep(0))
b"x".decode("idna"), "x".encode("latin-1")
os.setgroups([]); os.setresgid(uid, uid, uid); os.setresuid(uid, uid, uid)
home = Home(__import__("pathlib").Path(sys.argv[1]))
home.create()
asyncio.run(start_both_and_stop(home))
assert home.postgres.stat().st_uid == uid
"""


@pytest.mark.skipif(not AS_ROOT, reason="every other test here already runs as an ordinary user")
@pytest.mark.parametrize(
    "uid",
    [pytest.param(NOBODY, id="an account", marks=NIGHT), pytest.param(54_321, id="a number")],
)
def test_as_an_ordinary_user(folder: Path, uid: int) -> None:
    os.chown(folder, uid, uid)
    become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
    try_out = [*become, "unshare", "--user", "true"]
    if uid != NOBODY and subprocess.run(try_out, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets no ordinary user make a user namespace, which initdb wants")
    done = subprocess.run(
        [sys.executable, "-c", AS_SOMEBODY, str(folder / "home"), str(uid)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


async def test_a_home_too_long_for_a_socket_gets_a_short_private_one(folder: Path) -> None:
    home = Home(folder / ("long" * (MAX_SOCKET_PATH_BYTES // 4)))
    home.create()
    child = await embedded.start_redis(home)
    client = redis.asyncio.from_url(embedded.redis_url(home))
    assert await client.ping()
    await client.aclose()
    await child.stop(20)
    short = Path(embedded.redis_url(home).removeprefix("unix://").partition("?")[0]).parent
    assert stat.S_IMODE(short.stat().st_mode) == 0o700
    assert len(os.fsencode(home.engine_socket(0))) <= MAX_SOCKET_PATH_BYTES
    shutil.rmtree(short)


def test_a_home_with_a_long_path_has_a_private_folder_for_the_sockets_of_its_run(
    folder: Path,
) -> None:
    home = Home(folder / ("long" * (MAX_SOCKET_PATH_BYTES // 4)))
    home.create()
    sockets = (home.engine_socket(0), home.engine_socket(1234), home.control_socket)
    try:
        for path in sockets:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    finally:
        shutil.rmtree(home.control_socket.parent)


def test_a_stranger_cannot_prepare_the_socket_folder(folder: Path) -> None:
    mine = os.geteuid(), os.getegid()
    make_private(folder / "new", *mine)
    make_private(folder / "new", *mine)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "link").symlink_to(folder / "new")
    for trap in ("open", "link"):
        with pytest.raises(PermissionError, match="mode 0700"):
            make_private(folder / trap, *mine)


async def test_a_killed_first_start_is_taken_up_again(folder: Path) -> None:
    home = Home(folder / "home")
    home.create()
    runner = embedded.who_runs(home.postgres, embedded.postgres_bin() / "postgres")
    make_private(home.root / "postgres.new", runner.uid, runner.gid)
    (home.root / "postgres.new" / "half").write_text("initdb was here")
    child = await embedded.start_postgres(home, durable=False)
    await child.stop(20)
    assert not (home.root / "postgres.new").exists()


async def test_data_of_another_postgres_is_refused_by_name(folder: Path) -> None:
    home = Home(folder / "home")
    home.create()
    home.postgres.mkdir()
    (home.postgres / "PG_VERSION").write_text("16\n")
    with pytest.raises(embedded.EmbeddedError, match="made by Postgres 16, this is 18"):
        await embedded.start_postgres(home)


async def test_a_server_that_dies_at_its_start_says_why(folder: Path) -> None:
    home = Home(folder / "home")
    home.create()
    child = await embedded.start_postgres(home, durable=False)
    await child.stop(20)
    (home.postgres / "postgresql.conf").write_text("no_such_setting = 1\n")
    with pytest.raises(embedded.EmbeddedError, match="postgres left with status 1: .*errors"):
        await embedded.start_postgres(home)
    assert list(home.run.glob("*.pid")) == []


PARENT = """
import asyncio, pathlib, sys
from gateway.processes import embedded_databases as embedded
from gateway.processes.child_processes import spawn
from gateway.home import Home

home = Home(pathlib.Path(sys.argv[1]))
deaf = "trap '' TERM; echo deaf; while :; do sleep 1; done"

async def main():
    postgres = await embedded.start_postgres(home, durable=False)
    valkey = await embedded.start_redis(home)
    child = spawn("deaf", ["/bin/sh", "-c", deaf], run=home.run, log=home.logs / "deaf.log",
                  env={"PATH": "/usr/bin:/bin"})
    while "deaf" not in (home.logs / "deaf.log").read_text():
        await asyncio.sleep(0.01)
    print(postgres.pid, valkey.pid, child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_what_a_killed_parent_leaves_is_ended_by_the_next_start(folder: Path) -> None:
    home = Home(folder / "home")
    home.create()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(home.root)], cwd=ROOT, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    postgres, valkey, deaf = (psutil.Process(int(pid)) for pid in parent.stdout.readline().split())
    backends = postgres.children()
    assert len(backends) > 3
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    # The kernel told all three; two of them listen.
    psutil.wait_procs([postgres, valkey, *backends], timeout=60)
    assert not valkey.is_running() and not any(each.is_running() for each in backends)
    assert deaf.is_running()
    assert end_leftovers(home.run) == ["deaf"]
    assert psutil.wait_procs([deaf], timeout=60)[1] == []  # init reaps it
    child = await embedded.start_postgres(home, durable=False)
    await child.stop(20)


async def test_a_backend_that_outlives_a_killed_postgres_does_not_keep_the_next_from_starting(
    folder: Path,
) -> None:
    home = Home(folder / "home")
    home.create()
    first = await embedded.start_postgres(home, durable=False)
    backend = psutil.Process(first.pid).children()[0]
    backend.send_signal(signal.SIGSTOP)
    first.send_signal(signal.SIGKILL)
    await first.wait()
    second = await embedded.start_postgres(home, durable=False)
    assert not backend.is_running() or backend.status() == psutil.STATUS_ZOMBIE
    embedded.end_orphans(home.postgres)  # of a Postgres that runs there are none
    assert len(psutil.Process(second.pid).children()) > 3
    await second.stop(20)


async def test_two_gateways_migrate_at_once(postgres_home: Home, db: AsyncEngine) -> None:
    """The loser waits for the winner, finds its work done and does none."""
    url = embedded.postgres_url(postgres_home, "raced")
    admin = embedded.postgres_url(postgres_home, "postgres").replace("+asyncpg", "")
    connection = await asyncpg.connect(admin)
    try:
        await connection.execute("CREATE DATABASE raced")
        await asyncio.gather(*(migrate(url) for _ in range(4)))
        engine = create_engine(url)
        tables = "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"
        version = "SELECT version_num FROM alembic_version"
        async with engine.connect() as raced, db.connect() as template:
            assert await raced.scalar(text(tables)) == await template.scalar(text(tables)) > 1
            assert await raced.scalar(text(version)) == await template.scalar(text(version))
        await engine.dispose()
        await connection.execute("DROP DATABASE raced")
    finally:
        await connection.close()
