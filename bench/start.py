"""How long `tollgate up` takes to its first token, the first time and the second.

    python -m bench.start [--starts N] [--dry]

Each start is timed from the command to the first content of a streamed answer, on one fresh home.
The result goes to `bench/results/`.
"""

from __future__ import annotations

import argparse
import json
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


def timed_start(home: Path) -> float:
    port = free_port()
    command = [str(Path(sys.executable).parent / "tollgate"), "up"]
    command += ["--home", str(home), "--port", str(port)]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        first_token(home, port, started + TIMEOUT_S)
        return time.monotonic() - started
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(TIMEOUT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--starts", type=int, default=4, help="the first one among them")
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tgs-", dir="/tmp"))
    try:
        seconds = [timed_start(folder / "home") for _ in range(options.starts)]
    finally:
        shutil.rmtree(folder)
    first, later = seconds[0], sorted(seconds[1:])
    print(f"first start {first:.1f} s, later starts {', '.join(f'{s:.1f}' for s in later)} s")
    if not options.dry:
        print(record("start", {"first_s": first, "later_s": later}))


if __name__ == "__main__":
    main()
