"""A server finds what it fetched at its next start, each owner its own, within bounds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcp_bridge.upstream.stdio import package_caches
from mcp_bridge.upstream.stdio.package_caches import PackageCaches
from mcp_bridge.upstream.stdio.process import Launcher, ProcessOwner
from tests.mcp_bridge.upstream.stdio.servers import OWNER, python_spec

SCRIPT = """
import os
folder = os.environ["npm_config_cache"]
os.makedirs(folder, exist_ok=True)
print(sorted(os.listdir(folder)), os.environ["XDG_CACHE_HOME"] == os.path.dirname(folder))
open(os.path.join(folder, "package"), "w").write("x")
"""
OTHER = ProcessOwner(tenant="org_b", credential_set="none")


async def said(launcher: Launcher, owner: ProcessOwner = OWNER) -> str:
    process = await launcher.start(python_spec(SCRIPT), owner, {})
    written = await process.stdout.read()
    await process.stop()
    return written.decode().strip()


@pytest.mark.parametrize("kind", ["launcher", "uid_launcher", "sandbox_launcher"])
async def test_a_cache_is_kept_for_its_owner_alone(
    kind: str, request: pytest.FixtureRequest
) -> None:
    launcher: Launcher = request.getfixturevalue(kind)
    assert await said(launcher) == "[] True"
    assert await said(launcher) == "['package'] True"
    assert await said(launcher, OTHER) == "[] True"


def test_two_that_run_at_once_share_none(tmp_path: Path) -> None:
    caches = PackageCaches(tmp_path / "caches")
    taken = [caches.take("k", None) for _ in range(package_caches.MAX_OF_ONE_KEY + 1)]
    assert taken.pop() is None
    found = [each for each in taken if each is not None]
    assert len({each.folder for each in found}) == package_caches.MAX_OF_ONE_KEY
    for each in found:
        caches.give_back(each)
    again = caches.take("k", None)
    assert again is not None and again.folder == found[0].folder
    caches.give_back(again)


@pytest.mark.parametrize("bound", ["MAX_CACHE_BYTES", "MAX_CACHE_FILES"])
def test_what_outgrows_its_bound_is_removed(
    tmp_path: Path, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = PackageCaches(tmp_path / "caches")
    cache = caches.take("k", None)
    assert cache is not None
    for name in ("a", "b"):
        (cache.folder / name).write_text("x")
    (cache.folder / "link").symlink_to("/")
    monkeypatch.setattr(package_caches, bound, 2)
    caches.give_back(cache)
    assert not cache.folder.exists()


def test_what_nobody_used_for_a_month_is_removed(tmp_path: Path) -> None:
    caches = PackageCaches(tmp_path / "caches")
    old, used = caches.take("old", None), caches.take("used", None)
    assert old is not None and used is not None
    caches.give_back(old)
    for each in (old, used):
        os.utime(each.folder.with_name(f"{each.folder.name}.lock"), (0, 0))
    caches.remove_unused()
    assert not old.folder.exists() and used.folder.exists()
    caches.give_back(used)
