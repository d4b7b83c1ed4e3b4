"""Launchers by how much they keep a server from us."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcp_bridge.upstream.stdio.isolation import Bubblewrap, NoIsolation, OwnUid
from mcp_bridge.upstream.stdio.process import Launcher
from mcp_bridge.upstream.stdio.uids import UidLeases, may_change_uid
from tests.mcp_bridge.upstream.stdio.servers import FIRST_UID


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Make a folder where every user may go through, as pytest's own folders are not."""
    folder = Path(tempfile.mkdtemp(prefix="tollgate-stdio-", dir="/tmp"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def launcher(scratch: Path) -> Launcher:
    return Launcher(NoIsolation(), scratch / "servers")


@pytest.fixture
def uid_launcher(scratch: Path) -> Launcher:
    if not may_change_uid():
        pytest.skip("only root starts servers under another uid")
    leases = UidLeases(scratch / "uids", first=FIRST_UID)
    return Launcher(OwnUid(leases), scratch / "servers")


@pytest.fixture
def sandbox_launcher(scratch: Path) -> Launcher:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    return Launcher(Bubblewrap(), scratch / "servers")
