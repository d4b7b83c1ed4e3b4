"""`make run` as its reader runs it: an ordinary user, a plain environment, the printed examples,
Ctrl-C. The installation is the one that runs the tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from bench.tools.ports import free_port
from engine.kernels.cpu.compiling.kernel_cache import SOURCES

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(sys.prefix)
AS_ROOT = os.geteuid() == 0
ORDINARY = 65_534
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
LAST_WORDS = "Ctrl-C"
"""The printed example ends with this; a line of the log may follow."""
READ_EVERYTHING = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
"""Needed if this checkout or its interpreter is under /root. It grants reading alone, not writing.
"""


def as_ordinary_user() -> list[str]:
    """Return the words before a command with which root lets an ordinary user run it."""
    if not AS_ROOT:
        return []
    become = ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups"]
    same = "import os, sys; sys.exit(sys.argv[1:] != [sys.version, os.__file__])"
    probe = [*become, "--", str(VENV / "bin" / "python"), "-c", same, sys.version, os.__file__]
    reaches = subprocess.run(probe, cwd=ROOT, capture_output=True, timeout=60, check=False)
    return [*become, *(() if reaches.returncode == 0 else READ_EVERYTHING), "--"]


def give(folder: Path) -> None:
    """To that user, with the kernels that this one has compiled, which takes longer than the test:
    where nobody has, the test does."""
    kernels = folder / ".cache" / "tollgate"
    for found in (SOURCES / "__pycache__").glob("cpu-*"):
        shutil.copytree(found, kernels / found.name)
    for path in (folder, *folder.glob("**/*")):
        os.chown(path, ORDINARY, ORDINARY)


@pytest.fixture
def folder() -> Iterator[Path]:
    """That user's own, in /tmp: pytest's folders are too long for a socket, and root's."""
    made = Path(tempfile.mkdtemp(prefix="tg-", dir="/tmp"))
    if AS_ROOT:
        give(made)
    yield made
    shutil.rmtree(made)


def run_as(user: Sequence[str], command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(
        [*user, *command],
        cwd=folder,
        env=plain(folder),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def plain(folder: Path) -> dict[str, str]:
    return {"HOME": str(folder), "PATH": "/usr/local/bin:/usr/bin:/bin"}


@pytest.mark.slow
def test_make_run_as_an_ordinary_user(folder: Path) -> None:
    user = as_ordinary_user()
    home, output = folder / "state", folder.with_name(f"{folder.name}.log")
    arguments = [f"VENV={VENV}", f"ARGS=--home {home} --port {free_port()}"]
    with output.open("wb") as log:
        process = subprocess.Popen(
            [*user, "make", "-o", str(VENV / ".runtime"), "run", *arguments],
            cwd=ROOT,
            env=plain(folder),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    children: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while LAST_WORDS not in (said := output.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        if AS_ROOT:
            assert {child.uids().real for child in children} == {ORDINARY}
        if shutil.which("curl"):
            curl = "curl -sS" + said.partition("\ncurl")[2].partition("\n\n")[0]
            assert '"finish_reason"' in run_as(user, ["/bin/sh", "-c", curl], folder)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: make hears it too
        process.wait(STOP_TIMEOUT_S)
        assert psutil.wait_procs(children, timeout=STOP_TIMEOUT_S)[1] == []
        assert "Stopping." in output.read_text()
    finally:
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()
        output.unlink()


@pytest.mark.parametrize("missing", ["ensurepip", "venv"])
def test_a_python_without_venv_is_told_what_to_install(folder: Path, missing: str) -> None:
    script = ROOT / "requirements" / "make_venv.py"
    code = (
        "import importlib.util, os, runpy, shutil, sys\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name == {missing!r} else find(name)\n"
        "os.geteuid = lambda: 1000\n"
        f"sys.argv = ['make_venv.py', {str(folder / 'venv')!r}]\n"
        f"runpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"{sys.executable} has no {missing}; first: sudo apt-get install python{version}-venv\n"
    )
    assert not (folder / "venv").exists()


def test_a_python_that_apt_get_does_not_help_is_not_asked_again(folder: Path) -> None:
    code = (
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'ensurepip' else find(name)\n"
        f"sys.argv = ['make_venv.py', {str(folder / 'venv')!r}, '--installed']\n"
        f"runpy.run_path({str(ROOT / 'requirements' / 'make_venv.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"{sys.executable} still has no ensurepip; set PYTHON=/path/to/another\n"
    )
