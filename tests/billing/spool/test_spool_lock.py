"""One process holds a spool directory, while others adopt and remove it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from billing.errors import SpoolLocked
from billing.spool.spool import Spool
from tests.billing.samples import an_event
from tests.billing.spool.test_spool import shipped


async def test_one_process_holds_a_directory(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path / "s")
    with pytest.raises(SpoolLocked, match="held by another process"):
        await Spool.open(tmp_path / "s", lock_wait_s=0.1)
    waiting = asyncio.create_task(Spool.open(tmp_path / "s"))
    await asyncio.sleep(0.1)
    await spool.remove()  # as an adopter does: the waiter must not end up in the removed folder
    mine = await waiting
    await mine.close(event := an_event())
    await mine.shutdown()
    assert (await shipped(tmp_path / "s")).keys() == {event.id}


@pytest.mark.parametrize("moment", ["before the lock is opened", "before it is held"])
async def test_a_directory_removed_under_the_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """An adopter may remove the directory between any two steps of `_lock`."""
    module, name = (os, "open") if moment.endswith("opened") else (fcntl, "flock")
    real = getattr(module, name)

    def removing(*arguments: Any) -> Any:
        monkeypatch.undo()
        shutil.rmtree(tmp_path / "s")
        return real(*arguments)

    monkeypatch.setattr(module, name, removing)
    spool = await Spool.open(tmp_path / "s", lock_wait_s=0)
    assert os.path.samestat(os.fstat(spool._files._lock), (tmp_path / "s" / "lock").stat())
    await spool.shutdown()


async def test_a_directory_removed_while_it_is_looked_for_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when it was to be made, and is gone when it is looked at."""

    def was_there(path: Path, mode: int) -> None:
        monkeypatch.undo()
        raise FileExistsError(path)

    monkeypatch.setattr(os, "mkdir", was_there)
    await (await Spool.open(tmp_path / "s")).shutdown()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        await Spool.open(tmp_path / "file")
