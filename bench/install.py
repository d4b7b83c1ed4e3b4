"""How long `make run` takes to install, beside an earlier revision, in turns.

    python -m bench.install --before REVISION [--pairs N] [--warm] [--dry]

Each side is installed from a clone of its own into a fresh environment. Without `--warm` no side
has anything of pip's or uv's cache; with it both have all of it. The result goes to
`bench/results/`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from bench.tools.record import record

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 1800.0


def clone(revision: str, folder: Path) -> None:
    subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(folder)], check=True)
    subprocess.run(["git", "checkout", "-q", "--detach", revision], cwd=folder, check=True)


def timed_install(checkout: Path, caches: Path) -> float:
    """Seconds until the environment is there, which is removed again."""
    environ = {**os.environ, "PIP_CACHE_DIR": str(caches / "pip"), "UV_CACHE_DIR": f"{caches}/uv"}
    started = time.monotonic()
    subprocess.run(
        ["make", ".venv/.runtime"],
        cwd=checkout,
        env=environ,
        stdout=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=True,
    )
    seconds = time.monotonic() - started
    shutil.rmtree(checkout / ".venv")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--before", required=True, help="the revision to compare with")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="both sides have been installed before")
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {"before": [], "now": []}
    folder = Path(tempfile.mkdtemp(prefix="tgi-", dir="/tmp"))
    try:
        for side, revision in (("before", options.before), ("now", "HEAD")):
            clone(revision, folder / side)
            if options.warm:
                timed_install(folder / side, folder / f"caches-{side}")
        for _ in range(options.pairs):
            for side, measured in seconds.items():
                caches = folder / f"caches-{side}"
                if not options.warm:
                    shutil.rmtree(caches, ignore_errors=True)
                measured.append(timed_install(folder / side, caches))
    finally:
        shutil.rmtree(folder)
    ratio = statistics.median(seconds["now"]) / statistics.median(seconds["before"])
    for side, measured in seconds.items():
        print(f"{side}: {', '.join(f'{each:.1f}' for each in sorted(measured))} s")
    print(f"{ratio:.2f} of the time before, {'warm' if options.warm else 'empty'} caches")
    if not options.dry:
        result = {"before": options.before, "warm": options.warm, "seconds": seconds}
        print(record("install", result | {"ratio": ratio}))


if __name__ == "__main__":
    main()
