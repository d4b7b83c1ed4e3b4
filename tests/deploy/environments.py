"""Makes empty environments for what is to be installed, with the pip and uv of the tests' own."""

from __future__ import annotations

import importlib.util
import sys
import venv
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def installer() -> ModuleType:
    """Return requirements/install.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("install", ROOT / "requirements" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fresh_environment(folder: Path) -> Path:
    venv.create(folder, with_pip=False)
    (packages(folder) / "pip").symlink_to(packages(Path(sys.prefix)) / "pip")
    (folder / "bin" / "uv").symlink_to(Path(sys.prefix) / "bin" / "uv")
    return folder


def packages(environment: Path) -> Path:
    return next(environment.glob("lib/python3*/site-packages"))
