"""How long `tollgate up` takes to its first token, the first time and the second, and to stop.

    python -m bench.start [--starts N] [--dry]

Each start is timed from the command to the first content of a streamed answer, on one fresh home;
each stop from Ctrl-C to the process's end.
The result goes to `bench/results/`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from bench.tools.ports import free_port
from bench.tools.record import record

TIMEOUT_S = 120.0
POLL_S = 0.02


def first_token(home: Path, port: int, deadline: float) -> None:
    """Ask until somebody answers; returns with the first content. Raises: TimeoutError."""
    body = {"model": "penny", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    while time.monotonic() < deadline:
        try:
            key = json.loads((home / "credentials.json").read_text())["api_key"]
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                data=json.dumps(body).encode(),
                headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                if any(b'"content":"' in line and b'"content":""' not in line for line in answer):
                    return
        except (OSError, ValueError):
            time.sleep(POLL_S)
    raise TimeoutError(f"no token within {TIMEOUT_S} s")


def timed_start(home: Path) -> tuple[float, float]:
    """Return how long it took to the first token and, after Ctrl-C, to its end, in seconds."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "tollgate"), "up"]
    command += ["--home", str(home), "--port", str(port)]
    started = time.monotonic()
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # as `make run` has it
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
    try:
        first_token(home, port, started + TIMEOUT_S)
        answered = time.monotonic()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(TIMEOUT_S)
    return answered - started, time.monotonic() - answered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--starts", type=int, default=4, help="the first one among them")
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tgs-", dir="/tmp"))
    try:
        timed = [timed_start(folder / "home") for _ in range(options.starts)]
    finally:
        shutil.rmtree(folder)
    first, later = timed[0][0], sorted(start for start, _ in timed[1:])
    stops = sorted(stop for _, stop in timed)
    print(f"first start {first:.1f} s, later starts {in_row(later)} s, stops {in_row(stops)} s")
    if not options.dry:
        print(record("start", {"first_s": first, "later_s": later, "stop_s": stops}))


def in_row(seconds: list[float]) -> str:
    return ", ".join(f"{each:.1f}" for each in seconds)


if __name__ == "__main__":
    main()
