"""The end of tasks that would go on forever."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 1.0
"""Longer than what a task does when it is cancelled."""


async def end(*tasks: asyncio.Task[Any], again_s: float | None = None) -> None:
    """Cancel them until they have ended; what they raise is theirs. `again_s`: after which what is
    left is cancelled again; None: AGAIN_S. Once is not enough: up to Python 3.11
    `asyncio.wait_for`, with which redis-py sends, loses a cancellation that comes as its work is
    done (https://github.com/python/cpython/issues/86296), and a loop around goes on."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=again_s or AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()
