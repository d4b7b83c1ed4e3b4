"""Loads large libraries at the start of a process: without a search for garbage, and without those
of their parts that the process never uses.

Modules are made of objects that stay. The collector looks through all of them again and again
while they become more, which is a tenth to a fifth of what an import takes (docs.python.org,
`gc.freeze`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, module_from_spec


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage inside, and never look through what was made there afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def hiding(name: str) -> Iterator[None]:
    """Let a package look as if it were not installed, to libraries that import it where it is: what
    they import inside goes without it for good. Does nothing if it is imported already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # what makes its import fail (`import`)
    try:
        yield
    finally:
        del sys.modules[name]


def import_part(package: str, part: str) -> None:
    """Import one module of a package, which then has the public names of that module alone: its
    own `__init__` is not run. Does nothing if the package is imported already."""
    if package in sys.modules:
        return
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(package, name=package)
    bare = sys.modules[package] = module_from_spec(spec)
    parent, _, name = package.rpartition(".")
    if parent:
        setattr(import_module(parent), name, bare)
    found = vars(import_module(f"{package}.{part}"))
    vars(bare).update((each, found[each]) for each in found if not each.startswith("_"))
