"""Counts what requests make a process ask of others: system calls, by strace(1), commands of Redis,
and allocations, by a library that is loaded into it first."""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import redis

ATTACH_TIMEOUT_S = 10.0
POLL_S = 0.02
COUNTER = "BENCH_ALLOCATIONS"
"""The variable that names the file of the count."""
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
static unsigned long before, *count = &before;
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
void *malloc(size_t n) { __atomic_add_fetch(count, 1, 0); return __libc_malloc(n); }
void *calloc(size_t n, size_t m) { __atomic_add_fetch(count, 1, 0); return __libc_calloc(n, m); }
void *realloc(void *p, size_t n) { __atomic_add_fetch(count, 1, 0); return __libc_realloc(p, n); }
__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("BENCH_ALLOCATIONS");
    int file = path ? open(path, O_RDWR) : -1;
    void *shared = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared != MAP_FAILED) count = shared;
}
"""
"""glibc's own names of what it replaces stay within its reach."""


class Allocations:
    """Counts the allocations of processes that are started with `environment`, Python's small
    objects included. Built into `folder`."""

    def __init__(self, folder: Path) -> None:
        source, library = folder / "allocations.c", folder / "allocations.so"
        self._counter = folder / "allocations"
        source.write_text(SOURCE)
        self._counter.write_bytes(bytes(8))
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True)
        self.environment = {
            "LD_PRELOAD": str(library),
            COUNTER: str(self._counter),
            "PYTHONMALLOC": "malloc",
        }

    def read(self) -> int:
        (count,) = struct.unpack("Q", self._counter.read_bytes())
        return int(count)


def count_requests(
    ask: Callable[[], int],
    pid: int,
    folder: Path,
    *,
    redis_url: str | None = None,
    made: Allocations | None = None,
) -> dict[str, float]:
    """Return what a request takes: system calls, commands of a Redis, and allocations, where the
    process was started to count them. `ask`: makes requests and returns how many were answered."""
    ask()  # what is done once
    found: dict[str, float] = {}
    before, commands = made.read() if made else 0, num_commands(redis_url)
    num_requests = ask()
    if made is not None:
        found["allocations"] = round((made.read() - before) / num_requests, 1)
    if redis_url is not None:
        found["redis_commands"] = round((num_commands(redis_url) - commands) / num_requests, 2)
    traced: list[int] = []
    syscalls = count_syscalls(pid, folder / "syscalls", lambda: traced.append(ask()))
    if syscalls is not None:
        found["syscalls"] = round(syscalls / traced[0], 2)
    return found


def num_commands(redis_url: str | None) -> int:
    """Return how many commands a Redis has run by now."""
    if redis_url is None:
        return 0
    with redis.Redis.from_url(redis_url) as client:
        return int(client.info("stats")["total_commands_processed"])


def count_syscalls(pid: int, file: Path, work: Callable[[], None]) -> int | None:
    """Count the system calls of a process and all its threads while `work` runs; None where there
    is no strace. `file`: for its summary."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    command = [strace, "-f", "-c", "-U", "calls,name", "-o", str(file), "-p", str(pid)]
    tracing = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until_traced(pid, tracing.pid)
        work()
    finally:
        tracing.send_signal(signal.SIGINT)
        tracing.wait()
    found = re.findall(r"^\s*(\d+)\s+(\w+)$", file.read_text(), re.MULTILINE)
    return sum(int(calls) for calls, name in found if name != "total")


def wait_until_traced(pid: int, tracer: int) -> None:
    """Wait until all threads of a process are traced. Raises: TimeoutError."""
    deadline = time.monotonic() + ATTACH_TIMEOUT_S
    while time.monotonic() < deadline:
        status = [
            Path(f"/proc/{pid}/task/{thread}/status").read_text()
            for thread in os.listdir(f"/proc/{pid}/task")
        ]
        if all(f"TracerPid:\t{tracer}\n" in each for each in status):
            return
        time.sleep(POLL_S)
    raise TimeoutError(f"{pid} is not traced")
