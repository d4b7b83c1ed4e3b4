"""Describes the processor that engines compute on, as far as it decides what is fast."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import msgspec
import torch

CPUINFO = Path("/proc/cpuinfo")
FEATURES = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)
"""The features that kernels of ours or of torch's libraries ask for, by the names of Linux."""


class Machine(msgspec.Struct, frozen=True):
    """Names what has to be alike for a measured choice to hold."""

    processor: str
    features: tuple[str, ...]
    cores: int
    threads: int
    torch: str


def this_machine() -> Machine:
    """Describe where this process runs, with the threads that torch uses now."""
    processor, features = _processor()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Machine(processor, features, cores or 1, torch.get_num_threads(), str(torch.__version__))


@cache
def _processor() -> tuple[str, tuple[str, ...]]:
    """Return the processor's name with its model's numbers, and those of FEATURES it has."""
    fields: dict[str, str] = {}
    if CPUINFO.exists():
        for line in CPUINFO.read_text().partition("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    name = fields.get("model name") or platform.processor() or platform.machine()
    numbers = [fields[key] for key in ("cpu family", "model", "stepping") if key in fields]
    known = set((fields.get("flags") or fields.get("Features") or "").split())
    return " ".join([name, "-".join(numbers)]).strip(), tuple(f for f in FEATURES if f in known)
