"""Keeps compiled kernels on disk, so that only a first start compiles them.

    <root>/cpu-<digest>/<part>/            a part of the kernels: what numba stores, and MANIFEST
    <root>/cpu-<digest>/<part>.lock        held by the process that compiles the part

The digest is of all that the machine code depends on: the kernels' text and its times, by which
numba tells old from new; Python; the compilers; the processor and its features. A part appears
under its name when all of it is on the disk, and is read only while every file is what MANIFEST
says: what is half written, damaged, or of another compiler or processor is never loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parents[1]
PARTS = {
    "attention": ("attention",),
    "linear": ("linear",),
    "rows": ("rows", "rotary", "drawing", "plan", "program"),
    "library_linear": ("library_linear",),
    "int8_linear": ("int8_linear",),
}
"""The modules of `engine/kernels/cpu` that are compiled together. One that imports another with
kernels is in its part."""
MANIFEST = "MANIFEST"
MAX_KEPT = 8
"""Folders of other texts, compilers and processors that are kept, the latest ones."""


def part_of(module: str) -> str:
    """Return the part that a module is compiled with."""
    return next(part for part, modules in PARTS.items() if module in modules)


class KernelCache:
    """The kernels that were compiled from one text for one processor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, part: str) -> Path | None:
        """Return the folder of a part; None unless all of it is there, unchanged."""
        folder = self.folder / part
        try:
            noted = (folder / MANIFEST).read_text()
            return folder if noted == _manifest_of(folder) else None
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    @contextmanager
    def locked(self, part: str) -> Iterator[None]:
        """Wait for whoever compiles a part, and keep others from it."""
        with (self.folder / f"{part}.lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def replacing(self, part: str) -> Iterator[Path]:
        """Give an empty folder to compile a part into, which takes the part's place when all went
        well. Call it while `locked`."""
        made = Path(tempfile.mkdtemp(prefix=f"{part}.", suffix=".new", dir=self.folder))
        try:
            yield made
            (made / MANIFEST).write_text(_manifest_of(made))
            _sync(made)
            shutil.rmtree(self.folder / part, ignore_errors=True)
            made.rename(self.folder / part)
        finally:
            shutil.rmtree(made, ignore_errors=True)


@cache
def kernel_cache() -> KernelCache:
    """Return the cache of this text on this processor, in a folder that nobody else can write to.
    Raises ImportError without llvmlite."""
    name = f"cpu-{_digest()}"
    for parent in (SOURCES / "__pycache__", Path.home() / ".cache" / "tollgate"):
        try:
            (parent / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(parent / name, os.W_OK) and (parent / name).stat().st_uid == os.getuid():
            _forget_old(parent, name)
            return KernelCache(parent / name)
    # Nothing that lasts is writable: compiled for this process alone.
    return KernelCache(Path(tempfile.mkdtemp(prefix="tollgate-kernels-")))


def _digest() -> str:
    import llvmlite
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features().flatten()
    digest = hashlib.sha256(
        repr((sys.version, llvmlite.__version__, llvm.get_host_cpu_name(), features)).encode()
    )
    digest.update(_numba_version().encode())
    for path in sorted(SOURCES.glob("*.py")):
        found = path.stat()
        digest.update(f"{path.name} {found.st_mtime_ns} {found.st_size}".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _numba_version() -> str:
    from importlib.metadata import version  # numba itself takes half a second to import

    return version("numba")


def _manifest_of(folder: Path) -> str:
    """Return a line for each file below: its SHA-256 and its path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.relative_to(folder)}\n"
        for path in files
    )


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _forget_old(parent: Path, name: str) -> None:
    others = [each for each in parent.glob("cpu-*") if each.name != name]
    by_age = sorted(others, key=lambda each: each.stat().st_mtime, reverse=True)
    for each in by_age[MAX_KEPT:]:
        shutil.rmtree(each, ignore_errors=True)
