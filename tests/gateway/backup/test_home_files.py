"""A spool that is read while its gateway writes and ships it: with what the books have by then, no
event is lost, and none is taken for damaged."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billing.events import UsageEvent
from billing.spool.directory import Position, SpoolDirectory
from billing.spool.files import read_file
from billing.spool.format import CloseRecord, OpenRecord, SegmentStart, frame
from billing.spool.quarantine import Quarantine
from gateway.backup import home_files
from gateway.backup.archive import Chunk
from gateway.home import Home
from tests.billing.samples import an_event
from tests.budget import examples

STEPS = ("close", "rotate", "ship", "ship one")
steps = st.lists(st.sampled_from(STEPS), max_size=5)


class Gateway:
    """A gateway as far as it writes and ships its spool; `booked` is what Postgres has."""

    def __init__(self, home: Home) -> None:
        self.files = SpoolDirectory(home.spool / "worker-0", lock_wait_s=0)
        self.closed: list[UsageEvent] = []
        self.booked: set[str] = set()

    def take(self, step: str) -> None:
        if step == "close":
            event = an_event()
            self.files.append(frame(OpenRecord(event.attempt)) + frame(CloseRecord(event)))
            self.closed.append(event)
        elif step == "rotate":
            self.files.rotate(frame(SegmentStart([])))
        else:
            self.booked |= ship(self.files, limit=1 if step == "ship one" else 1000)


def ship(files: SpoolDirectory, limit: int = 1000) -> set[str]:
    batch = files.read_closed(limit, files.durable_end)
    files.commit(batch)
    return {event.id for event in batch.events}


class Store:
    """Chunks in memory."""

    def __init__(self) -> None:
        self.chunks: dict[str, bytes] = {}

    def put(self, data: bytes) -> Chunk:
        name = str(len(self.chunks))
        self.chunks[name] = data
        return Chunk(name, len(data))


@given(before=st.lists(st.sampled_from(STEPS), max_size=12), during=st.lists(steps, max_size=8))
@settings(max_examples=examples(200))
def test_a_spool_and_the_books_have_every_event_that_was_closed_before(
    before: list[str], during: list[list[str]]
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        home, restored = Home(Path(folder, "home")), Home(Path(folder, "other"))
        home.create()
        restored.create()
        gateway = Gateway(home)
        for step in before:
            gateway.take(step)
        wanted = {event.id for event in gateway.closed}
        store, turns = Store(), iter(during)
        patch.setattr(home_files, "read_file", interrupted(lambda: next(turns, []), gateway))
        files = list(home_files.back_up_spools(home, store.put))
        for turn in turns:
            for step in turn:
                gateway.take(step)
        booked = set(gateway.booked)  # as the snapshot sees it
        gateway.files.release()
        for file in files:
            path = restored.root / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(store.chunks[chunk.name] for chunk in file.chunks))
        found = SpoolDirectory(restored.spool / "worker-0", lock_wait_s=0)
        assert found.recovered == []
        shipped = ship(found)
        found.release()
        assert wanted <= booked | shipped <= {event.id for event in gateway.closed}
        assert list(Quarantine(restored.spool).entries(resolved=True)) == []


def interrupted(turn: Callable[[], list[str]], gateway: Gateway) -> Callable[[Path], bytes]:
    """`read_file`, before which the gateway goes on."""

    def read(path: Path) -> bytes:
        for step in turn():
            gateway.take(step)
        return read_file(path)

    return read


def test_a_cursor_is_never_ahead_of_its_segments(tmp_path: Path) -> None:
    """Records that a restored gateway writes would be skipped."""
    home = Home(tmp_path)
    home.create()
    gateway, store = Gateway(home), Store()
    for step in ("close", "rotate", "close", "ship", "rotate", "close"):
        gateway.take(step)
    gateway.files.release()
    files = {file.path.rpartition("/")[2] for file in home_files.back_up_spools(home, store.put)}
    assert files == {"lock", "cursor", "00000002.log", "00000003.log"}
    assert gateway.files.cursor < Position(3, 0)
