"""`tollgate gateway`, which samples where its processor time goes.

`python -m bench.tools.sampled FILE OPTIONS...`: SIGUSR1 begins, SIGUSR2 ends and writes to FILE
what was seen: {"cpu_s": of the whole process, "samples": {part: count}}. A sample is taken for each
SAMPLE_S of processor time, or whenever the kernel's clock ticks if that is less often, and is put
down to the part whose code runs: the innermost frame that belongs to one, so that what a library
does counts for who called it. Frames are seen between two instructions of Python, so a call into C
counts for its caller; what runs with no frame of any part is the event loop's: its tasks, timers
and system calls.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from gateway.cli.main import main

SAMPLE_S = 0.001
LOOP = "event loop and system calls"
PARTS = (
    ("gateway/limits/", "limits"),
    ("gateway/tenancy/", "who asks"),
    ("gateway/auth/", "who asks"),
    ("gateway/lanes.py", "who asks"),
    ("billing/spool/", "spool"),
    ("billing/", "to Postgres"),
    ("gateway/bookkeeping/", "to Postgres"),
    ("gateway/request_log/", "to Postgres"),
    ("foundation/http1.py", "HTTP to the upstream"),
    ("gateway/fleet/", "what the upstream is sent and says"),
    ("gateway/wire/", "wire formats"),
    ("gateway/telemetry/", "metrics, stages and traces"),
    ("gateway/traces/", "metrics, stages and traces"),
    ("foundation/stages.py", "metrics, stages and traces"),
    ("gateway/cache_report/", "cache report"),
    ("gateway/routes/", "ASGI layers and route"),
    ("gateway/inference/", "main path"),
    ("gateway/ids.py", "main path"),
    ("gateway/app/connection.py", "HTTP server"),
    ("uvicorn/", "HTTP server"),
    ("litestar/", "Litestar"),
    ("mcp_bridge/", "MCP bridge"),
    ("gateway/batches/", "work beside requests"),
    ("gateway/webhooks/", "work beside requests"),
    ("gateway/health/", "work beside requests"),
    ("foundation/periodic.py", "work beside requests"),
    ("gateway/app/worker.py", LOOP),
    ("gateway/cli/", LOOP),
    ("gateway/", "all else of the gateway"),
)


def part_of(frame: FrameType | None) -> str:
    while frame is not None:
        file = frame.f_code.co_filename
        for place, part in PARTS:
            if f"/{place}" in file:
                return part
        frame = frame.f_back
    return LOOP


class Sampler:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._samples: Counter[str] = Counter()
        self._begun_s = 0.0

    def listen(self) -> None:
        signal.signal(signal.SIGPROF, self._sample)
        signal.signal(signal.SIGUSR1, self._begin)
        signal.signal(signal.SIGUSR2, self._end)

    def _sample(self, _number: int, frame: FrameType | None) -> None:
        self._samples[part_of(frame)] += 1

    def _begin(self, _number: int, _frame: FrameType | None) -> None:
        self._samples.clear()
        self._begun_s = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        found = {"cpu_s": time.process_time() - self._begun_s, "samples": self._samples}
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps(found))
        fresh.replace(self._file)


if __name__ == "__main__":
    _, wanted, *options = sys.argv
    Sampler(Path(wanted)).listen()
    sys.argv = ["tollgate", "gateway", *options]
    main()
