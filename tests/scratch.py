"""Folders in memory for all that tests write, where the machine has some to spare.

A cluster is 1,700 files: to copy one in memory takes a tenth of what a disk takes. A kill takes
what a process holds and leaves its files, here as on a disk.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil

MEMORY = Path("/dev/shm")
DISK = Path("/tmp")
SPARE_BYTES = 6 << 30


def scratch_root() -> Path:
    """Return a folder whose path is short enough for sockets."""
    has_room = MEMORY.is_mount() and shutil.disk_usage(MEMORY).free >= SPARE_BYTES
    return MEMORY if has_room else DISK


SCRATCH = scratch_root()


def make_scratch() -> Path:
    """Make a folder that the caller removes."""
    return Path(tempfile.mkdtemp(prefix=f"tg-{os.getpid()}-", dir=SCRATCH))


def scratch_for_a_while() -> tempfile.TemporaryDirectory[str]:
    """Make a folder that goes with the object."""
    return tempfile.TemporaryDirectory(prefix=f"tg-{os.getpid()}-", dir=SCRATCH)


def remove_leftovers() -> None:
    """Remove the folders of test processes that were killed."""
    for folder in SCRATCH.glob("tg-*-*"):
        made_by = re.fullmatch(r"tg-(\d+)-\w+", folder.name)
        if made_by and not psutil.pid_exists(int(made_by[1])):
            shutil.rmtree(folder, ignore_errors=True)
