"""Make a virtual environment with pip in it: `python make_venv.py FOLDER`. Standard library only.

Debian and Ubuntu ship Python without `ensurepip`, or without `venv`, until pythonX.Y-venv is
installed: root gets it installed here, anybody else gets the one line that says what to install.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

NEEDED = ("venv", "ensurepip")
INSTALLED = "--installed"
"""Tells the second run that the package is there now, so that there is no third."""


def install(package: str, missing: str) -> None:
    """Exits with one line where it cannot."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(f"{sys.executable} has no {missing}; first: sudo apt-get install {package}")
    print(f"installing {package}, which this Python's venv needs", file=sys.stderr)
    for arguments in (["update", "-qq"], ["install", "-y", "-qq", package]):
        done = subprocess.run(["apt-get", *arguments], check=False, stdout=subprocess.DEVNULL)
        if done.returncode != 0:
            sys.exit(f"`apt-get {' '.join(arguments)}` failed; {sys.executable} has no {missing}")


def main(target: Path, installed: bool) -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing and installed:
        sys.exit(f"{sys.executable} still has no {missing[0]}; set PYTHON=/path/to/another")
    if missing:
        install(f"python{sys.version_info.major}.{sys.version_info.minor}-venv", missing[0])
        # A fresh interpreter: this one has already cached what is absent.
        os.execv(sys.executable, [sys.executable, __file__, str(target), INSTALLED])
    import venv

    venv.create(target, with_pip=True, clear=target.exists())


if __name__ == "__main__":
    main(Path(sys.argv[1]), INSTALLED in sys.argv[2:])
