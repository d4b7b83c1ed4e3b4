"""Compiles kernels: `python -m engine.kernels.cpu.compiling` those that every model needs, where an
engine would ask for them, and `... FOLDER PART ...` parts into a folder.

A part that another process is at is waited for, and not compiled again.
"""

from __future__ import annotations

import ctypes
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.kernels.cpu.compiling.compilers import compiling
from engine.kernels.cpu.compiling.kernel_cache import PARTS, KernelCache

PR_SET_PDEATHSIG = 1
"""prctl(2): a signal for this process when its parent ends."""


def main(argv: Sequence[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not argv:
        with compiling("auto"):
            return
    cache = KernelCache(Path(argv[0]))
    for part in argv[1:]:
        with cache.locked(part):
            if cache.find(part) is None:
                with cache.replacing(part) as folder:
                    compile_part(part, folder)


def compile_part(part: str, folder: Path) -> None:
    import numba

    numba.config.CACHE_DIR = str(folder)
    for module in PARTS[part]:
        importlib.import_module(f"engine.kernels.cpu.{module}")


if __name__ == "__main__":
    main(sys.argv[1:])
