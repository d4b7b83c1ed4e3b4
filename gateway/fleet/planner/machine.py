"""Describes the machine that engines share, and measures its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gateway.fleet.planner.view import PlacedEngine
from gateway.settings.models import ModelConfig

WEIGHTS = "*.safetensors"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The functions by which it is asked, and what does not change."""

    available_bytes: Callable[[], int | None]
    """None: it is not known."""
    engine_bytes: Callable[[str], int | None]
    """The memory of the engine at an address."""
    growing_bytes: Callable[[], int]
    """The memory of all engines together that start and that no settings name yet."""
    expected_bytes: Callable[[ModelConfig, Sequence[ModelConfig]], int]
    """A guess of the memory of a model's engine beside those of all models."""
    num_threads: Callable[[ModelConfig, Sequence[ModelConfig]], int]
    """The processors that a model's engine computes on."""
    num_cores: int
    placed: Callable[[], list[PlacedEngine]] = list
    """The engines that run or start on devices which the settings name."""


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that programs may still take, in a container those that it may; None where
    the kernel does not say."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return None
    group = root / "sys/fs/cgroup"
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        return available if limit == "max" else max(min(available, int(limit) - used), 0)
    except (OSError, ValueError):
        return available


def weights_bytes(folder: Path | None) -> int:
    """Return the bytes of a model's weights on disk; 0: there are none here."""
    if folder is None or not folder.is_dir():
        return 0
    return sum(path.stat().st_size for path in folder.glob(WEIGHTS))


def memory_of(pid: int) -> int | None:
    """Return the memory of a process, what it shares counted in part; None: it is gone, or nobody
    says."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), None)
