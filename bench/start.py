"""How long `tollgate up` takes to its first token, penny to an instance of a class, both to a stop.

    python -m bench.start [--starts N] [--parses N] [--cold] [--dry]

Each start is timed from the command to the first content of a streamed answer, on one fresh home;
each stop from Ctrl-C to the process's end. Between them OpenAI's SDK asks penny for the two fields
of a class, `client.chat.completions.parse`, so that the first of each start has a schema that no
process has seen. A recorded run ends with 1 where a later start takes more than 3 s, a stop or a
parsed answer more than 2. `--cold`: from a fresh clone of HEAD under this environment, so that the
first start compiles the kernels, and Python's bytecode, too; a recorded run ends with 1 where that
start takes more than 8 s. The result goes to `bench/results/`.
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
from typing import NamedTuple

from openai import OpenAI
from pydantic import BaseModel

from bench.install import ROOT, clone
from bench.tools.ports import free_port
from bench.tools.record import record

TIMEOUT_S = 120.0
POLL_S = 0.02
COLD_BOUND_S, START_BOUND_S, BOUND_S = 8.0, 3.0, 2.0
QUESTION = "Bern has 134591 inhabitants. Answer as JSON."


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


class City(BaseModel):
    name: str
    population: int


def timed_parses(home: Path, port: int, number: int) -> list[float]:
    """Return how long each answer took that is an instance of a class, in seconds."""
    key = json.loads((home / "credentials.json").read_text())["api_key"]
    took = []
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0) as client:
        for _ in range(number):
            begun = time.monotonic()
            parsed = client.chat.completions.parse(
                model="penny",
                messages=[{"role": "user", "content": QUESTION}],
                response_format=City,
            )
            took.append(time.monotonic() - begun)
            if not isinstance(parsed.choices[0].message.parsed, City):
                raise SystemExit(f"no city: {parsed.choices[0]}")
    return took


class Start(NamedTuple):
    """Holds what one start took, in seconds."""

    first_token: float
    parses: list[float]
    stop: float


def timed_start(checkout: Path, home: Path, parses: int) -> Start:
    """Start, ask for `parses` instances of a class, and stop."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "tollgate"), "up"]
    command += ["--home", str(home), "--port", str(port)]
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # as `make run` has it
    environ["PYTHONPATH"] = str(checkout)
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=checkout, env=environ, stdout=subprocess.DEVNULL)
    try:
        first_token(home, port, started + TIMEOUT_S)
        answered = time.monotonic()
        took = timed_parses(home, port, parses)
    finally:
        asked_to_stop = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(TIMEOUT_S)
    return Start(answered - started, took, time.monotonic() - asked_to_stop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--starts", type=int, default=4, help="the first one among them")
    parser.add_argument("--parses", type=int, default=10, help="of each start")
    parser.add_argument("--cold", action="store_true", help="from a fresh clone of HEAD")
    parser.add_argument("--dry", action="store_true", help="print the result, record nothing")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tgs-", dir="/tmp"))
    checkout = folder / "clone" if options.cold else ROOT
    try:
        if options.cold:
            clone("HEAD", checkout)
        timed = [
            timed_start(checkout, folder / "home", options.parses) for _ in range(options.starts)
        ]
    finally:
        shutil.rmtree(folder)
    first, later = timed[0].first_token, sorted(each.first_token for each in timed[1:])
    stops = sorted(each.stop for each in timed)
    parses = sorted(took for each in timed for took in each.parses)
    kind = "first start of a fresh clone" if options.cold else "first start"
    print(f"{kind} {first:.1f} s, later starts {in_row(later)} s, stops {in_row(stops)} s")
    print(f"{len(parses)} classes parsed: {in_row(parses[:1])} to {in_row(parses[-1:])} s")
    if not options.dry:
        result = {"first_s": first, "later_s": later, "stop_s": stops, "parse_s": parses}
        print(record("start_cold" if options.cold else "start", result))
        is_late = max(later) > START_BOUND_S or max(stops + parses) > BOUND_S
        if is_late or (options.cold and first > COLD_BOUND_S):
            sys.exit(1)


def in_row(seconds: list[float]) -> str:
    return ", ".join(f"{each:.2f}" for each in seconds)


if __name__ == "__main__":
    main()
