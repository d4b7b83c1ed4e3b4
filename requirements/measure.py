"""Write sizes.json, how much each stage of the installation downloads: `python measure.py UV`.

Run by `make lock`. Sizes are those of this machine's wheels, in MB; torch's are written by hand, as
its CPU build is in no index that has sizes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

HERE = Path(__file__).resolve().parent
TORCH = {"torch_cpu": 190, "torch_cuda": 2600}


def main(uv: str) -> None:
    bytes_of = {name: sizes(uv, HERE / name) for name in ("uv.txt", "runtime.lock", "dev.lock")}
    runtime, dev = bytes_of["runtime.lock"], bytes_of["dev.lock"]
    added = {name: size for name, size in dev.items() if name not in runtime}
    found = {
        "uv": bytes_of["uv.txt"],
        "runtime": runtime,
        "dev": added | sizes(uv, HERE / "without_deps.txt"),
    }
    megabytes = {name: round(sum(each.values()) / 1e6) for name, each in found.items()}
    (HERE / "sizes.json").write_text(json.dumps(megabytes | TORCH, indent=2) + "\n")


def sizes(uv: str, lock: Path) -> dict[str, int]:
    """Return the bytes of each package's file for this machine, by the package's name."""
    command = [uv, "pip", "compile", "-q", "--no-deps", "--format", "pylock.toml", str(lock)]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {each["name"]: size_of(each) for each in tomllib.loads(made)["packages"]}


def size_of(package: dict[str, Any]) -> int:
    """Raises: LookupError if no file of it fits this machine."""
    order = {tag: position for position, tag in enumerate(sys_tags())}
    fitting: list[tuple[int, int]] = []
    for wheel in package.get("wheels", []):
        tags = parse_wheel_filename(wheel["url"].rpartition("/")[2])[3]
        best = min((order[tag] for tag in tags if tag in order), default=None)
        if best is not None:
            fitting.append((best, wheel["size"]))
    if fitting:
        return min(fitting)[1]
    if "sdist" in package:
        return int(package["sdist"]["size"])
    raise LookupError(f"{package['name']}: no file for this machine")


if __name__ == "__main__":
    main(sys.argv[1])
