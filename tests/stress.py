"""Run the whole suite several times, each in another order, while something else keeps every core
busy: what fails is a race.

    python -m tests.stress [SEED ...]        # `make test-stress`; seeds 1 2 3 by default
"""

from __future__ import annotations

import os
import subprocess
import sys

SPIN = "while True: pass"


def main(seeds: list[str]) -> int:
    """Return how many of the runs failed."""
    busy = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(os.cpu_count() or 1)]
    failed = 0
    try:
        for seed in seeds:
            print(f"order {seed}", flush=True)
            environment = os.environ | {"SUITE_ORDER": seed}
            ended = subprocess.run(["make", "tests"], env=environment, check=False)
            failed += ended.returncode != 0
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"{failed} of {len(seeds)} runs failed")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["1", "2", "3"]))
