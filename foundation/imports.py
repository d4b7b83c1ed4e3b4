"""Loads large libraries at the start of a process without a search for garbage.

Modules are made of objects that stay. The collector looks through all of them again and again
while they become more, which is a tenth to a fifth of what an import takes (docs.python.org,
`gc.freeze`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
