"""Starts the processes that compile kernels, and waits for what they make.

A process that loads kernels compiles none itself: numba would link the functions on the way to a
kernel, too, which call products that only the kernel holds.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from engine.kernels.cpu.compiling.kernel_cache import KernelCache, kernel_cache

logger = logging.getLogger(__name__)

MODULE = "engine.kernels.cpu.compiling"
ROOT = Path(__file__).parents[4]
FIRST_PARTS = (("attention",), ("linear",), ("rows",))
"""The parts that every model needs, one process each; the last ones share where there are fewer
cores."""
DRIVER = Path("/proc/driver/nvidia")


@contextmanager
def compiling(device: str) -> Iterator[None]:
    """Compile what an engine on `device` will ask for and is not there yet, meanwhile."""
    begun = _begin() if _will_ask(device) else []
    try:
        yield
    except BaseException:
        for process in begun:
            process.kill()
        raise
    finally:
        for process in begun:
            process.wait()


def compiled(part: str) -> Path:
    """Return the folder with a part's kernels, which are compiled now if nobody has.

    Raises RuntimeError when they cannot be.
    """
    cache, began = kernel_cache(), time.monotonic()
    if (folder := cache.find(part)) is None:
        failed = _start(cache, [part]).wait()
        if failed or (folder := cache.find(part)) is None:
            raise RuntimeError(f"the kernels of {part} cannot be compiled into {cache.folder}")
        took_s = time.monotonic() - began
        logger.info("kernels of %s: waited %.1f s, as at each first start", part, took_s)
    return folder


def _will_ask(device: str) -> bool:
    """Return whether kernels for a processor will be asked for. torch, which knows, is not imported
    yet; in doubt, they are compiled in vain."""
    on_processor = device == "cpu" or (device == "auto" and not DRIVER.exists())
    return on_processor and find_spec("numba") is not None


def _begin() -> list[subprocess.Popen[bytes]]:
    cache = kernel_cache()
    count = min(len(os.sched_getaffinity(0)), len(FIRST_PARTS))
    shared = [part for parts in FIRST_PARTS[count - 1 :] for part in parts]
    wanted = [
        [part for part in parts if cache.find(part) is None]
        for parts in (*FIRST_PARTS[: count - 1], shared)
    ]
    return [_start(cache, parts) for parts in wanted if parts]


def _start(cache: KernelCache, parts: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", MODULE, str(cache.folder), *parts]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
