"""`tollgate`, killed with SIGKILL at its Nth step: a file that was written and has no name yet, or
a step in the restored database, before and after its commit.

    python -m tests.gateway.backup.doomed N ARGUMENTS...
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 120


def run_doomed(step: int, *arguments: str, **environ: str) -> bool:
    """Return whether it was killed; what comes to its end must have done what it should."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gateway.backup.doomed", str(step), *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), (done.returncode, done.stdout, done.stderr)
    return done.returncode != 0


def main() -> None:
    from gateway.backup import archive, restoration
    from gateway.cli.main import tollgate

    last, steps = int(sys.argv[1]), count(1)

    def step() -> None:
        if next(steps) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    class DoomedOs:
        """The module `os`, whose `fsync` is a step."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def fsync(self, fd: int) -> None:
            os.fsync(fd)
            step()

    async def run(self: Any, name: str, work: Callable[[Any], Awaitable[Any]]) -> None:
        async def doomed(connection: Any) -> None:
            await work(connection)
            step()

        await whole(self, name, doomed)
        step()

    whole = restoration.RestoredDatabase.run
    archive.os = DoomedOs()  # type: ignore[assignment]
    restoration.RestoredDatabase.run = run  # type: ignore[method-assign]
    tollgate(sys.argv[2:], prog_name="tollgate")


if __name__ == "__main__":
    main()
