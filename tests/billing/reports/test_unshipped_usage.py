"""A request is found in the spools whatever has become of it, beside their owner."""

from __future__ import annotations

from pathlib import Path

import msgspec

from billing.events import Quantities
from billing.reports.unshipped_usage import search
from billing.spool.spool import Spool
from tests.billing.samples import an_attempt, an_event

USED = Quantities(uncached_input=7, output=3)
HALF = Quantities(uncached_input=7, output=1)


async def test_what_runs_what_is_over_and_what_never_was(tmp_path: Path) -> None:
    spools = [await Spool.open(tmp_path / name, segment_bytes=400) for name in ("0", "1")]
    runs, over, void, other = (
        msgspec.structs.replace(an_attempt(), request_id=f"req_{name}")
        for name in ("runs", "over", "void", "other")
    )
    for each in (runs, over, void, other):
        spools[0].attempt_opened(each)
    spools[0].checkpoint(runs.id, HALF, False)
    await spools[0].void(void.id)
    await spools[0].close(an_event(over, USED))
    for number in range(3):  # enough to begin other segments, which carry what runs
        later = msgspec.structs.replace(an_attempt(), request_id=f"req_later{number}")
        spools[1].attempt_opened(later)
        await spools[0].close(an_event(an_attempt(), USED))
        await spools[1].close(an_event(later, USED))

    found = search(tmp_path, "req_runs")
    assert found.closed == []
    [running] = found.open
    assert running.attempt == runs
    assert running.checkpoint is not None and running.checkpoint.quantities == HALF
    assert search(tmp_path, "req_over").closed == [an_event(over, USED)]
    assert search(tmp_path, "req_over").open == []
    assert [each.id for each in search(tmp_path, "req_later2").closed] == [later.id]
    for nowhere in ("req_void", "req_unknown"):
        nothing = search(tmp_path, nowhere)
        assert (nothing.closed, nothing.open) == ([], [])

    spools[0].checkpoint(runs.id, USED, False)
    await spools[0].close(an_event(runs, USED))
    ended = search(tmp_path, "req_runs")
    assert ([each.id for each in ended.closed], ended.open) == ([runs.id], [])
    for spool in spools:
        await spool.shutdown()


async def test_no_more_than_its_bound_is_read(tmp_path: Path) -> None:
    assert search(tmp_path, "req_x").closed == []
    spool = await Spool.open(tmp_path / "0")
    for _ in range(2):
        await spool.close(an_event())
    assert len(search(tmp_path, "req_1").closed) == 2
    assert search(tmp_path, "req_1", max_bytes=1).closed == []
    await spool.shutdown()
