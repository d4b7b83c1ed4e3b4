"""How much memory is free for the KV cache on the device.

A container's limit counts where it is below the memory of the machine.
"""

from __future__ import annotations

from pathlib import Path

import torch

from engine.errors import ConfigError

CGROUP_V1_UNLIMITED = 1 << 60
"""v1 writes "no limit" as the largest multiple of a page."""


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on `device` now. ConfigError when the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_free_bytes(Path("/"))


def used_bytes(device: torch.device) -> int:
    """Return the bytes that this process holds on `device`: of host memory, what is no file's."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    status = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) * 1024


def host_free_bytes(root: Path) -> int:
    """The least of MemAvailable and of what each enclosing control group leaves. `root` is "/"."""
    rooms = [_mem_available(root), *_cgroup_rooms(root)]
    return max(0, min(rooms))


def _mem_available(root: Path) -> int:
    path = root / "proc/meminfo"
    try:
        fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} does not say what is free; set kv_cache_bytes") from error


def _cgroup_rooms(root: Path) -> list[int]:
    """Room under every memory limit above this process; empty without control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inner = mount / path.lstrip("/")
        # A container sees its own group mounted at the top, whatever its path is called outside.
        for group in (inner, *inner.parents):
            if group.is_relative_to(mount):
                rooms += _group_room(group, *names)
    return rooms


def _group_room(group: Path, limit_name: str, usage_name: str) -> list[int]:
    """Limit less usage, page cache that can be dropped not counted as used; [] without a limit."""
    try:
        limit = (group / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= CGROUP_V1_UNLIMITED:
            return []
        usage = int((group / usage_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return []
    droppable = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
    return [int(limit) - usage + droppable]
