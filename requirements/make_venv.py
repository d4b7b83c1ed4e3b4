"""Make a virtual environment with pip in it: `python make_venv.py FOLDER`. Standard library only.

Debian and Ubuntu ship `venv` without `ensurepip` until pythonX.Y-venv is installed: root gets it
installed here, anybody else gets the one line that says what to install.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path


def install_ensurepip() -> None:
    """Exits with one line where it cannot."""
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(f"this Python has no ensurepip; first: sudo apt-get install {package}")
    print(f"installing {package}, which this Python's venv needs", file=sys.stderr)
    for arguments in (["update", "-qq"], ["install", "-y", "-qq", package]):
        subprocess.run(["apt-get", *arguments], check=True, stdout=subprocess.DEVNULL)


def main(target: Path) -> None:
    if importlib.util.find_spec("ensurepip") is None:
        install_ensurepip()
        # A fresh interpreter: this one has already cached that ensurepip is absent.
        os.execv(sys.executable, [sys.executable, *sys.argv])
    venv.create(target, with_pip=True, clear=target.exists())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
