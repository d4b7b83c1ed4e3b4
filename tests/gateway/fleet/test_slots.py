"""Slots that processes of one home share: never more than there are, whoever dies; lent while
their owner is idle, and its own again as soon as others' requests end."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.fleet import slots as slots_module
from gateway.fleet.slots import LOG_EVERY_S, MAX_LOOK, REST_S, SharedSlots
from gateway.fleet.upstream.routes import Rooms, places_of
from gateway.fleet.waiting_room import QueueTicket, WaitingRoom
from gateway.lanes import Priority
from gateway.settings.load import Settings, load
from gateway.settings.models import ModelConfig

OTHER = """
import sys
from pathlib import Path
from gateway.fleet.slots import SharedSlots
slots = SharedSlots(Path(sys.argv[1]), int(sys.argv[2]), share=int(sys.argv[3]), clock=lambda: 0)
taken = []
for line in sys.stdin:
    if line.strip() == "take":
        slot = slots.take()
        print(-1 if slot is None else slot, flush=True)
        taken += [] if slot is None else [slot]
    else:
        slots.give_back(taken.pop())
        print("back", flush=True)
"""


class Other:
    """Another gateway, which takes and gives back when it is told to; its clock stands still, so
    once it rests it rests for good."""

    def __init__(self, path: Path, number: int, share: int) -> None:
        command = [sys.executable, "-c", OTHER, str(path), str(number), str(share)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def says(self, word: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def take(self) -> int:
        return int(self.says("take"))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    """Start another of two processes that share ten slots."""
    started = Other(tmp_path / "slots", 10, 5)
    yield started
    started.kill()


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[SharedSlots]:
    opened = SharedSlots(tmp_path / "slots", 10, share=5)
    yield opened
    opened.close()


def test_never_more_than_there_are_and_all_of_the_dead(mine: SharedSlots, other: Other) -> None:
    theirs = [other.take() for _ in range(7)]
    taken = [mine.take() for _ in range(4)]
    assert taken[3] is None and not mine.is_any_free()
    assert sorted([*theirs, *taken[:3]]) == list(range(10)), "each once"
    other.kill()
    for _ in range(7):
        assert mine.take() is not None
    assert mine.num_taken == 10


def test_what_is_beyond_its_share_a_process_leaves_to_the_others_first(
    mine: SharedSlots, other: Other
) -> None:
    assert [other.take() for _ in range(8)].count(-1) == 0, "lent, while nobody else is there"
    assert [mine.take() is None for _ in range(3)] == [False, False, True]
    for _ in range(3):  # as one of its requests ends, the next does not have its slot
        assert other.says("give back") == "back" and other.take() == -1
        assert mine.take() is not None
    assert other.says("give back") == "back" and other.take() >= 0, "its share is its own"
    assert mine.num_taken == 5 and mine.take() is None


async def test_who_waits_is_served_when_another_gives_back(tmp_path: Path, other: Other) -> None:
    slots = SharedSlots(tmp_path / "slots", 10, share=5)
    room = WaitingRoom(5, slots=slots)
    for _ in range(10):
        other.take()
    assert room.backlog > 0
    came: list[QueueTicket] = [room.join(Priority(tenant="a"), 10) for _ in range(2)]
    assert not came[0].served.is_set()
    other.says("give back")
    await asyncio.wait_for(came[0].served.wait(), 30)
    assert not came[1].served.is_set() and room.num_waiting["interactive"] == 1
    room.leave(came[0])  # a slot of its share, so the next one of its own has it at once
    assert came[1].served.is_set()
    room.leave(came[1])
    room.check_integrity()
    assert room.backlog == 0.0
    room.close()
    assert slots.take() is None


def test_of_many_slots_each_is_seen_at_once_and_those_of_the_dead_soon(tmp_path: Path) -> None:
    """So whoever looks while the lender rests finds what it gave back, wherever it is."""
    other = Other(tmp_path / "slots", 512, 256)
    mine = SharedSlots(tmp_path / "slots", 512, share=256)
    try:
        assert {other.take() for _ in range(512)} == set(range(512))
        for _ in range(100):
            assert mine.take() is None and not mine.is_any_free()
            other.says("give back")
            assert mine.is_any_free() and mine.take() is not None
        other.kill()
        looks = [mine.take() for _ in range(512 // MAX_LOOK + 412)]
        assert len(set(looks) - {None}) == 412 and mine.num_taken == 512
    finally:
        other.kill()
        mine.close()


def test_what_died_before_is_free_after_all(tmp_path: Path) -> None:
    (tmp_path / "slots").write_bytes(b"\x01" * 512)
    mine = SharedSlots(tmp_path / "slots", 512, share=256)
    assert mine.is_any_free() and mine.num_taken == 0
    assert {mine.take() for _ in range(512)} == set(range(512))
    mine.close()


def test_who_rests_has_no_full_room(tmp_path: Path, other: Other) -> None:
    """A prediction that says full would refuse what is served REST_S later at the latest."""
    now = [0.0]
    mine = SharedSlots(tmp_path / "slots", 10, share=5, clock=lambda: now[0])
    room = WaitingRoom(5, slots=mine, clock=lambda: now[0])
    taken = [mine.take() for _ in range(6)]
    mine.give_back(taken[0] or 0)
    assert mine.take() is None and room.backlog == 0.0 and room.predicted_ttft_s(Priority()) == 0.0
    now[0] += REST_S
    assert mine.take() is not None
    for _ in range(4):
        other.take()
    assert room.backlog > 0
    room.close()


def test_what_the_kernel_refuses_waits(
    mine: SharedSlots,
    other: Other,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    monkeypatch.setattr(mine, "_clock", lambda: now[0])
    slot = mine.take()
    assert slot is not None

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, slots_module.__name__):
        patch.setattr(fcntl, "lockf", refuse)
        assert mine.take() is None
        mine.give_back(slot)
        assert len(caplog.records) == 1 and "No locks available" in caplog.text
        now[0] += LOG_EVERY_S
        assert mine.take() is None
        assert len(caplog.records) == 2
    assert mine.num_taken == 0
    assert [other.take() for _ in range(10)].count(-1) == 1, "that one is still locked"
    assert mine.take() == slot
    mine.give_back(slot)
    assert other.take() == slot


async def test_a_request_outlives_a_kernel_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = WaitingRoom(2, slots=SharedSlots(tmp_path / "slots", 2, share=2))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", refuse)
        came = room.join(Priority(tenant="a"), 10)
        assert not came.served.is_set()
    await asyncio.wait_for(came.served.wait(), 30)
    room.leave(came)
    room.check_integrity()
    room.close()


def test_what_was_closed_takes_nothing_back(tmp_path: Path) -> None:
    slots = SharedSlots(tmp_path / "slots", 2, share=1)
    slot = slots.take()
    assert slot is not None
    slots.close()
    slots.give_back(slot)
    slots.close()
    again = SharedSlots(tmp_path / "slots", 2, share=1)
    assert {again.take(), again.take()} == {0, 1}
    again.close()


def settings_of(home: Path, text: str) -> Settings:
    path = home / "tollgate.toml"
    path.write_text(text)
    return load({"home": home, "config": path}, {})


UP = '[[model]]\nname = "up"\n'


def test_each_worker_has_a_part_and_all_of_them_what_there_is(tmp_path: Path) -> None:
    upstream = 'upstream = "http://127.0.0.1:9/v1"\nmax_concurrency = 10\n'
    settings = settings_of(tmp_path, "workers = 4\n" + UP + upstream)
    [room] = Rooms().take(settings.models[0], settings)
    assert room is not None and room.max_concurrency == 2
    assert len({room._slots.take() for _ in range(10)} - {None}) == 10, "none is lost"
    room.close()


def test_one_worker_and_the_one_that_replaces_it_keep_the_bound(tmp_path: Path) -> None:
    upstream = 'upstream = "http://127.0.0.1:9/v1"\nmax_concurrency = 10\n'
    settings = settings_of(tmp_path, UP + upstream)
    [room] = Rooms().take(settings.models[0], settings)
    assert room is not None and room.max_concurrency == 10, "all of it is its own"
    (path,) = (tmp_path / "run/places").iterdir()
    old = Other(path, 10, 10)
    try:
        assert [old.take() for _ in range(7)].count(-1) == 0
        assert [room._slots.take() for _ in range(4)].count(None) == 1
        old.says("give back")
        assert room._slots.take() is not None and old.take() == -1
    finally:
        old.kill()
        room.close()


def test_an_upstream_has_its_slots_wherever_it_is_written(tmp_path: Path) -> None:
    def replica(port: int, more: str = "") -> str:
        return (
            f'[[model.replica]]\nupstream = "http://127.0.0.1:{port}/v1"\n'
            f"max_concurrency = 4\n{more}"
        )

    def files(*replicas: str) -> list[Path]:
        """Return the file of each replica, in their order."""
        settings = settings_of(tmp_path, UP + "".join(replicas))
        found = [path for _, path in places_of(settings.models[0], settings) if path is not None]
        assert len(found) == len(replicas)
        return found

    one, two, other_key = replica(8), replica(9), replica(9, 'api_key_env = "KEY"\n')
    before = files(one, two, other_key, two)
    assert len(set(before)) == 4, "one that is written twice has twice as many"
    assert files(two, other_key, two, one) == [before[1], before[2], before[3], before[0]]


def test_a_replica_and_the_one_that_replaces_it_share_a_room(tmp_path: Path) -> None:
    """A process that closes a file once loses all its locks on it, and locks nothing against
    itself: two rooms on one file would let pass twice as many."""

    def model_of(bound: int, more: str = "") -> tuple[ModelConfig, Settings]:
        upstream = f'upstream = "http://127.0.0.1:9/v1"\nmax_concurrency = {bound}\n'
        settings = settings_of(tmp_path, UP + upstream + more)
        return settings.models[0], settings

    rooms, old, new = Rooms(), model_of(4), model_of(4, "context_window = 9\n")
    [first], [second] = rooms.take(*old), rooms.take(*new)
    assert first is second and first is not None
    rooms.give_back(*old)
    assert first._slots.take() is not None, "the new one still uses it"
    [other] = rooms.take(*model_of(5))
    assert other is not first, "another bound, another file"
    rooms.give_back(*new)
    assert first._slots.take() is None, "nobody uses it any more: it is closed"
    assert other is not None and other._slots.take() is not None
    rooms.close()
