"""Writes what a benchmark measured, beside the machine it ran on, into bench/results/."""

from __future__ import annotations

import json
import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, system and Python."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": found.group(1).strip() if found else platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / (1 << 30), 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def record(name: str, result: dict[str, Any]) -> Path:
    """Write `<date>-<name>-<machine>.json`; a later run on the same day replaces it."""
    here = machine()
    slug = re.sub(r"[^a-z0-9]+", "-", f"{here['cpu']} {here['cores']}c".lower()).strip("-")
    now = datetime.now(UTC)
    path = RESULTS / f"{now:%Y-%m-%d}-{name}-{slug}.json"
    RESULTS.mkdir(exist_ok=True)
    content = {"benchmark": name, "at": now.isoformat(timespec="seconds"), "machine": here}
    path.write_text(json.dumps(content | result, indent=2) + "\n")
    return path
