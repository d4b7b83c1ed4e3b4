"""Launch parameters measured per device: read once, never found while serving.

Knows no kernel.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

TUNED = Path(__file__).parent / "tuned"


def launch_config(op: str, key: str, default: dict[str, int]) -> dict[str, int]:
    """`default`, with what was measured for this operation and shape class laid over it."""
    return default | _table().get(op, {}).get(key, {})


def device_slug(name: str) -> str:
    """The file's name of a device: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read_table(path: Path) -> dict[str, dict[str, dict[str, int]]]:
    """Empty where nobody has measured. Raises ValueError when the file is not such a table."""
    if not path.exists():
        return {}
    table: Any = json.loads(path.read_text())
    for op, by_key in table.items():
        for key, config in by_key.items():
            if not all(isinstance(value, int) for value in config.values()):
                raise ValueError(f"{path}: {op} {key} must hold integers only")
    return dict(table)


@cache
def _table() -> dict[str, dict[str, dict[str, int]]]:
    if not torch.cuda.is_available():
        return {}
    return read_table(TUNED / f"{device_slug(torch.cuda.get_device_name())}.json")
