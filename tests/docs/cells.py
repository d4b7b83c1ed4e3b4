"""Runs python blocks of a page in one interpreter: reads the path of one a line, answers `done`, or
`failed` with the traceback on standard error. What a block prints goes there, too."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    names: dict[str, object] = {"__name__": "__main__"}
    for line in sys.stdin:
        for each in Path(".cells.env").read_bytes().split(b"\0"):
            key, _, value = each.decode().partition("=")
            if key:
                os.environ[key] = value
        path = Path(line.strip())
        try:
            exec(compile(path.read_text(), str(path), "exec"), names)
        except Exception:
            traceback.print_exc()
            print("failed", file=answers)
        else:
            print("done", file=answers)


if __name__ == "__main__":
    main()
