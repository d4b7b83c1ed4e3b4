"""Checks a release out of the repository and runs it: a gateway as `tollgate gateway` starts it,
and an engine without a model, both of the release's own code."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from bench.tools.ports import free_port
from migrations.releases import Release
from tests.budget import NIGHTLY
from tests.test_tidy import ROOMS, ROOT

FOLDERS = (*ROOMS, "migrations", "models")
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 120.0
CONFIG = """
drain_timeout_s = 5.0
[[model]]
name = "penny"
path = "{tree}/models/penny"
engine = "unix:{folder}/engine.sock"
[plan.default]
[plan.narrow]
requests_per_minute = 2
"""
ENGINE = """
    import asyncio, sys
    from engine.fake.engine import FAKE_CONFIG, FakeCore
    from engine.transport.server import EngineServer

    core = FakeCore(FAKE_CONFIG)
    asyncio.run(EngineServer(core, sys.argv[1]).serve(asyncio.Event(), drain_timeout_s=1))
"""


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)


def commit_of(release: Release) -> str:
    """Return the commit of a release, an ancestor of this one. Its tag, if there is one, is there.

    A clone without tags has the commit all the same. One without history has not: the summary of
    the run says so, and at night it fails.
    """
    tagged = git("rev-parse", "--verify", "--quiet", f"{release.tag}^{{commit}}")
    if tagged.returncode == 0:
        found = tagged.stdout.decode().strip()
        assert found == release.commit, f"{release.tag} is at {found}: mend releases.toml"
    if git("merge-base", "--is-ancestor", release.commit, "HEAD").returncode != 0:
        missing = (
            f"NOT TESTED: {release.version} on this schema. Its commit {release.commit} is not in"
            " the history of this clone; git fetch --unshallow --tags"
        )
        assert not NIGHTLY, missing
        pytest.skip(missing)
    return release.commit


def check_out(release: Release, folder: Path) -> Path:
    """Write the release's code to `folder`."""
    packed = git("archive", "--format=tar", commit_of(release), "--", *FOLDERS)
    assert packed.returncode == 0, packed.stderr
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


class TreeProcesses:
    """The gateway and the engine of one source tree, on stores that others may use, too."""

    def __init__(self, tree: Path, folder: Path, stores: Mapping[str, str]) -> None:
        self.tree, self.folder = tree, folder
        self.config = folder / "tollgate.toml"
        self.config.write_text(CONFIG.format(tree=tree, folder=folder))
        self.env = {**os.environ, **stores, "PYTHONPATH": str(tree)}
        self.port = free_port()
        self.log = folder / "processes.log"
        self.gateway: subprocess.Popen[bytes] | None = None
        self._engine: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command of the tree to its end."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "gateway", *arguments, "--config", str(self.config)],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )

    def start(self) -> None:
        address = f"unix:{self.folder}/engine.sock"
        self._engine = self._spawn("-c", textwrap.dedent(ENGINE), address)
        command = ("-m", "gateway", "gateway", "--port", str(self.port))
        self.gateway = self._spawn(*command, "--config", str(self.config))
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            assert self.gateway.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.05)

    def _spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", *arguments],
                cwd=self.folder,
                env=self.env,
                stdout=log,
                stderr=log,
            )

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.base_url}/health/ready", timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """Leave no time to anything."""
        for process in (self.gateway, self._engine):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(STOP_TIMEOUT_S)

    def stop(self) -> int:
        """Drain; returns the gateway's status."""
        assert self.gateway is not None
        self.gateway.terminate()
        return self.gateway.wait(STOP_TIMEOUT_S)


@contextmanager
def processes(tree: Path, folder: Path, stores: Mapping[str, str]) -> Iterator[TreeProcesses]:
    """Yield those of a tree, not yet started; none is left behind."""
    folder.mkdir()
    made = TreeProcesses(tree, folder, stores)
    try:
        yield made
    finally:
        made.kill()
