"""Checks that what runs above the engine's line starts where torch cannot be imported at all.

import-linter reads import statements; this imports, so that it also sees what is imported by a
name in a string or by a library.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.processes.launching.extras import lacks_extra

ROOT = Path(__file__).resolve().parents[2]
BELOW_THE_LINE = {
    "core",
    "runner",
    "weights",
    "models",
    "layers",
    "kernels",
}
ROOMS = [room for room in ("engine", "gateway", "billing", "mcp_bridge") if (ROOT / room).is_dir()]

IMPORT_ALL = """
import importlib, sys
for name in ("torch", "triton", "transformers"):
    sys.modules[name] = None  # `import torch` raises ModuleNotFoundError
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def modules_of(room: str) -> list[str]:
    """Importable names of the room's files, without what is below the engine's line."""
    names = []
    for path in sorted((ROOT / room).rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[0] == "engine" and Path(parts[1]).stem in BELOW_THE_LINE:
            continue
        if parts == [
            "gateway",
            "__main__",
        ]:  # runs when imported; all it does is call gateway.cli.main
            continue
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in names if not lacks_extra(name)]


def import_all(names: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_starts_without_torch(room: str) -> None:
    names = modules_of(room)
    assert room in names
    done = import_all(names)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_engines_room_is_walked_up_to_the_line() -> None:
    names = modules_of("engine")
    above = [
        "protocol",
        "fake",
        "text.tokenizer",
        "scheduling.scheduler",
        "transport.client",
        "transport.server",
        "__main__",
    ]
    assert {f"engine.{name}" for name in above} <= set(names)
    assert not any(name.split(".")[1:2] == ["core"] for name in names)


def test_the_check_can_fail() -> None:
    done = import_all(["engine.core.engine_core"])
    assert done.returncode != 0
    assert "torch" in done.stderr
