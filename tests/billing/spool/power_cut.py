"""A disk without power: what was written and not synced is gone, or a part of it is.

`Disk` listens to the calls by which the spool writes and syncs, and knows of each file what a power
cut leaves. A failed sync drops what it covered, as Linux does: the next one says that all is well.
`VirtualLoop` and `VirtualSync` put time into the test's hands.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

STEP_S = 0.0005
"""The resolution of virtual time."""
SETTLED_AFTER = 12
"""Iterations of an event loop after which nothing is left to do at one time."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only by `advance`."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        async def iterate() -> None:
            for _ in range(SETTLED_AFTER):
                await asyncio.sleep(0)

        self.run_until_complete(iterate())

    def advance(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            self.settle()


class InlineExecutor(Executor):
    """Runs at once what is handed to threads."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class Survival(NamedTuple):
    """The part of what was not synced that is on disk after a power cut all the same."""

    share: float
    """From its beginning."""
    hole_start: float = 0.0
    hole_share: float = 0.0
    """The share of what survives that never came, and reads as zeros."""

    def of(self, unsynced: bytes) -> bytes:
        left = bytearray(unsynced[: int(len(unsynced) * self.share)])
        start = int(len(left) * self.hole_start)
        end = min(len(left), start + int(len(left) * self.hole_share))
        left[start:end] = bytes(end - start)
        return bytes(left)


NOTHING = Survival(0.0)


class Disk:
    """The disk under one folder. `failures`: errors of the next syncs; `sync_s`: how long one in
    the background takes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failures: list[int] = []
        self.sync_s = STEP_S
        self.num_syncs = 0
        self._durable: dict[int, bytearray] = {}
        self._dirty: dict[int, list[tuple[int, int]]] = {}
        self._names: dict[str, int] = {}
        self._kept: dict[int, int] = {}
        """A descriptor of each file: its number is not given to another one."""
        self._real = {name: getattr(os, name) for name in ("write", "pwrite", "fdatasync", "fsync")}

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in self._real:
                stack.enter_context(patch.object(os, name, getattr(self, f"_{name}")))
            yield
        for fd in self._kept.values():
            os.close(fd)

    def begin_sync(self, fd: int) -> Callable[[], None]:
        """Return what makes durable what is written by now."""
        number, covered = self._number(fd), self._dirty.pop(self._number(fd), [])
        self.num_syncs += 1
        if self.failures:
            failure = self.failures.pop(0)

            def fail() -> None:
                raise OSError(failure, os.strerror(failure))

            return fail
        content = self._content(fd)
        return lambda: self._make_durable(number, content, covered)

    def cut_power(self, survival: Survival) -> None:
        """Leave in the folder what a power cut leaves."""
        after: dict[str, bytes] = {}
        for name, number in self._names.items():
            durable = bytes(self._durable.get(number, b""))
            written = self._content(self._kept[number]) if number in self._kept else durable
            after[name] = durable + survival.of(written[len(durable) :])
        for path in self.folder.iterdir():
            path.unlink()
        for fd in self._kept.values():
            os.close(fd)
        self._durable, self._dirty, self._names, self._kept = {}, {}, {}, {}
        for name, content in after.items():
            (self.folder / name).write_bytes(content)
            with (self.folder / name).open("r+b") as file:
                self._fsync(file.fileno())
        self._note_names()

    def _number(self, fd: int) -> int:
        number = os.fstat(fd).st_ino
        if number not in self._kept:
            self._kept[number] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        return number

    def _is_here(self, fd: int) -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{fd}").startswith(f"{self.folder}/")
        except OSError:
            return False

    def _content(self, fd: int) -> bytes:
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            return file.read()

    def _make_durable(self, number: int, content: bytes, ranges: list[tuple[int, int]]) -> None:
        durable = self._durable.setdefault(number, bytearray())
        for start, end in ranges:
            end = min(end, len(content))  # it may have been cut off meanwhile
            durable.extend(bytes(max(0, end - len(durable))))
            durable[start:end] = content[start:end]

    def _write(self, fd: int, data: Any) -> int:
        if not self._is_here(fd):
            return int(self._real["write"](fd, data))
        start = os.lseek(fd, 0, os.SEEK_CUR)
        count = int(self._real["write"](fd, data))
        self._dirty.setdefault(self._number(fd), []).append((start, start + count))
        return count

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        count = int(self._real["pwrite"](fd, data, offset))
        self._dirty.setdefault(self._number(fd), []).append((offset, offset + count))
        return count

    def _fdatasync(self, fd: int) -> None:
        self.begin_sync(fd)()

    def _fsync(self, fd: int) -> None:
        if os.path.samestat(os.fstat(fd), self.folder.stat()):
            self._note_names()
        elif self._is_here(fd):
            content = self._content(fd)
            self._durable[self._number(fd)] = bytearray(content)

    def _note_names(self) -> None:
        self._names = {
            path.name: path.stat().st_ino for path in self.folder.iterdir() if path.name != "lock"
        }


class VirtualSync:
    """Stands in the place of `BackgroundSync`, on virtual time."""

    def __init__(self, disk: Disk) -> None:
        self._disk, self._loop = disk, asyncio.get_running_loop()
        self._running: asyncio.TimerHandle | None = None

    def sync(self, fd: int, on_done: Callable[[float | Exception], None]) -> None:
        took_s, finish = self._disk.sync_s, self._disk.begin_sync(fd)

        def end() -> None:
            try:
                finish()
            except OSError as error:
                on_done(error)
            else:
                on_done(took_s)

        self._running = self._loop.call_later(took_s, end)

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()


NO_SPACE, BAD_BLOCK = errno.ENOSPC, errno.EIO
