"""Checks which locks are removed before Postgres starts: a dead one's and a stranger's, no living
one's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gateway.home import Home
from gateway.processes import embedded_databases as embedded
from gateway.processes.embedded_databases import is_live_postmaster, remove_stale_locks


@pytest.fixture
def data(tmp_path: Path) -> Path:
    made = tmp_path / "postgres"
    made.mkdir()
    return made


def lock(data: Path, pid: int) -> list[Path]:
    """As Postgres writes them: for the data, and for the socket."""
    locks = [data / "postmaster.pid", data / ".s.PGSQL.5432.lock"]
    for path in locks:
        path.write_text(f"{pid}\n{data}\n1763740000\n5432\n{data}\n\n  1234  5\nready   \n")
    return locks


def kept(data: Path, pid: int) -> list[bool]:
    locks = lock(data, pid)
    remove_stale_locks(data, locks[1])
    return [path.exists() for path in locks]


def test_the_lock_of_a_process_that_is_gone_is_removed(data: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    assert kept(data, process.pid) == [False, False]


def test_the_lock_of_a_zombie_is_removed(data: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert kept(data, process.pid) == [False, False]
    process.wait()


def test_the_lock_of_a_stranger_with_that_pid_is_removed(data: Path, tmp_path: Path) -> None:
    assert kept(data, os.getpid()) == [False, False]
    folder = tmp_path / "other"
    folder.mkdir()
    script = """exec -a postgres /bin/bash -c 'read -r line' -D "$0" """
    process = subprocess.Popen(["/bin/bash", "-c", script, str(folder)], stdin=subprocess.PIPE)
    try:
        while psutil.Process(process.pid).cmdline()[:1] != ["postgres"]:
            time.sleep(0.01)
        assert kept(data, process.pid) == [False, False]
    finally:
        process.communicate()


def test_what_cannot_be_read_is_left_to_postgres(data: Path) -> None:
    (data / "postmaster.pid").write_text("")
    remove_stale_locks(data, data / ".s.PGSQL.5432.lock")
    assert (data / "postmaster.pid").exists()


def test_the_lock_of_a_postmaster_that_lives_stays(postgres_home: Home) -> None:
    locks = [postgres_home.postgres / "postmaster.pid"]
    locks.append(postgres_home.postgres / f"{embedded.POSTGRES_SOCKET}.lock")
    before = [path.read_bytes() for path in locks]
    remove_stale_locks(postgres_home.postgres, locks[1])
    assert [path.read_bytes() for path in locks] == before
    pid = int(before[0].split()[0])
    assert is_live_postmaster(pid, postgres_home.postgres)
    backend = psutil.Process(pid).children()[0]
    assert is_live_postmaster(backend.pid, postgres_home.postgres) is False, (
        "a child is no postmaster"
    )
