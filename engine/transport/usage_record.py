"""Records what an engine has generated, kept where a kill -9 does not take it: a mapped file.

    HEAD     magic, slots, since, clean, which totals are valid, boot id
    TOTALS   twice: those that are not valid are written, then one number says that they are
    SLOTS    a request whose usage no gateway has on its disk yet, and what it used so far

Kept is what the engine was about to tell its gateways: `note`, with every output, before it is
sent. An acknowledged request moves from its slot to the totals (`fold`), so that totals and slots
together are what was ever generated. The pages belong to the kernel, so the record outlives its
process; whoever opens it next offers what stands in the slots as orphans. It does not outlive the
kernel: one that was not closed before another boot is put aside (`.lost`), and what it may have
lacked then is unknown.

Knows no request but by its id.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.protocol import Usage

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MAGIC = 0x7467_7573_6167_6531
NUM_SLOTS = 16_384
"""The number of slots. A usage without one is only counted when it is folded, and is lost if the
process dies before."""
MAX_ID_BYTES = 64
LOST = ".lost"

# Of the head, in cells of 8 bytes.
_MAGIC, _NUM_SLOTS, _SINCE_US, _CLEAN, _VALID, _BOOT = 0, 1, 2, 3, 4, 8
_TOTALS = (16, 24)
_FOLDED_SLOT, _FOLDED_GENERATION = 4, 5
"""The fields of totals after their four numbers: the slot that they folded in last, and its
generation."""
_SLOTS, _SLOT_CELLS = 32, 16
_GENERATION, _USED, _ID_LENGTH, _ID = 0, 1, 4, 5
"""The fields of a slot. An odd generation is in use."""
_CELL = 8


class Totals(msgspec.Struct, frozen=True):
    requests: int = 0
    prompt_tokens: int = 0
    """Counts `Usage.input_tokens`, as the slots do: what was computed again is input."""
    cached_tokens: int = 0
    generated_tokens: int = 0

    def plus(self, usage: Usage) -> Totals:
        return Totals(
            self.requests + 1,
            self.prompt_tokens + usage.input_tokens,
            self.cached_tokens + usage.cached_tokens,
            self.generated_tokens + usage.generated_tokens,
        )


class UsageReading(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a record. While its engine runs a request may stand in both."""

    since: float
    """Unix seconds: it began at nothing then."""
    is_lost: bool
    """Put aside after its kernel had gone: there may have been more."""
    open: dict[str, Usage]
    """No gateway has acknowledged it."""
    acknowledged: Totals
    recent: dict[str, Usage]
    """The acknowledged usages whose slots were not reused since."""


class UsageRecord:
    """The writer's end; one process, one thread."""

    def __init__(self, path: Path) -> None:
        """Open, or begin, the record at `path`. Raises: OSError, also if another process has it."""
        self._boot_id = BOOT_ID.read_text().strip()
        _put_aside_unless_whole(path, self._boot_id)
        if not path.exists():
            _begin(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._map = mmap.mmap(self._fd, 0)
        self._cells = memoryview(self._map).cast("q")
        self._cells[_CLEAN] = 0
        self._map[_BOOT * _CELL : _BOOT * _CELL + len(self._boot_id)] = self._boot_id.encode()
        self._finish_folding()
        self._slots: dict[str, int] = {}
        self._without_slot: dict[str, Usage] = {}
        self._free: deque[int] = deque()
        """Longest free first: what stands in a slot is read long after."""
        self.left: dict[str, Usage] = {}
        """The usages of the process before that are on no gateway's disk as far as it knew."""
        for slot in range(self._cells[_NUM_SLOTS]):
            if _is_taken(self._cells, slot):
                request_id = _id_in(self._map, self._cells, slot)
                self._slots[request_id] = slot
                self.left[request_id] = _usage_in(self._cells, slot)
            else:
                self._free.append(slot)

    def note(self, request_id: str, usage: Usage) -> None:
        """So much by now. Before anybody is told."""
        slot = self._slots.get(request_id)
        if slot is None:
            slot = self._take(request_id)
            if slot is None:
                self._without_slot[request_id] = usage
                return
        at = _SLOTS + slot * _SLOT_CELLS + _USED
        self._cells[at] = usage.input_tokens
        self._cells[at + 1] = usage.cached_tokens
        self._cells[at + 2] = usage.generated_tokens

    def fold(self, request_id: str) -> None:
        """A gateway has it on its disk, or nobody ever will. Unknown ids change nothing."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            at = _SLOTS + slot * _SLOT_CELLS
            generation = self._cells[at]
            self._add(_usage_in(self._cells, slot), slot, generation)
            self._cells[at] = generation + 1
            self._free.append(slot)
        elif usage := self._without_slot.pop(request_id, None):
            self._add(usage, -1, 0)

    def close(self) -> None:
        """To the disk, with a mark that it is."""
        self._map.flush()
        self._cells[_CLEAN] = 1
        self._map.flush()
        self._cells.release()
        self._map.close()
        os.close(self._fd)

    def _take(self, request_id: str) -> int | None:
        name = request_id.encode()
        if not self._free or len(name) > MAX_ID_BYTES:
            return None
        slot = self._free.popleft()
        at = _SLOTS + slot * _SLOT_CELLS
        for cell in range(at + _USED, at + _ID_LENGTH):
            self._cells[cell] = 0
        self._cells[at + _ID_LENGTH] = len(name)
        start = (at + _ID) * _CELL
        self._map[start : start + len(name)] = name
        self._cells[at] += 1
        self._slots[request_id] = slot
        return slot

    def _add(self, usage: Usage, slot: int, generation: int) -> None:
        """Between any two of these lines the process may die."""
        valid = self._cells[_VALID]
        totals = _totals_in(self._cells).plus(usage)
        at = _TOTALS[1 - valid]
        for number, value in enumerate(msgspec.structs.astuple(totals)):
            self._cells[at + number] = value
        self._cells[at + _FOLDED_SLOT] = slot
        self._cells[at + _FOLDED_GENERATION] = generation
        self._cells[_VALID] = 1 - valid

    def _finish_folding(self) -> None:
        """The process before may have died after the totals were valid and before the slot was
        free."""
        at = _TOTALS[self._cells[_VALID]]
        slot, generation = self._cells[at + _FOLDED_SLOT], self._cells[at + _FOLDED_GENERATION]
        if generation and self._cells[_SLOTS + slot * _SLOT_CELLS] == generation:
            self._cells[_SLOTS + slot * _SLOT_CELLS] = generation + 1


def read(path: Path) -> UsageReading:
    """Return what stands there, whether or not its engine runs; of a lost one nothing may be left.

    Raises: OSError, ValueError if it is no record.
    """
    is_lost = path.suffix == LOST
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with memoryview(mapped) as view, view.cast("q") as cells:
            if len(cells) < _SLOTS or cells[_MAGIC] != MAGIC:
                if is_lost:
                    return UsageReading(
                        since=0, is_lost=True, open={}, acknowledged=Totals(), recent={}
                    )
                raise ValueError(f"{path} is no record of usage")
            # The slots first: what is folded meanwhile is then seen twice, and never missed.
            opened: dict[str, Usage] = {}
            recent: dict[str, Usage] = {}
            for slot in range(cells[_NUM_SLOTS]):
                if request_id := _id_in(mapped, cells, slot):
                    found = opened if _is_taken(cells, slot) else recent
                    found[request_id] = _usage_in(cells, slot)
            return UsageReading(
                since=cells[_SINCE_US] / 1_000_000,
                is_lost=is_lost,
                open=opened,
                acknowledged=_totals_in(cells),
                recent=recent,
            )


def records_of(path: Path) -> Iterator[Path]:
    """Those that were put aside, and the one at `path`; in the order of their beginnings."""
    yield from sorted(path.parent.glob(f"{path.name}.*{LOST}"))
    if path.exists():
        yield path


def _begin(path: Path) -> None:
    """All of it is there, or nothing."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        # A mapped page for which the disk has no room would be the end of its process.
        os.posix_fallocate(file.fileno(), 0, (_SLOTS + NUM_SLOTS * _SLOT_CELLS) * _CELL)
        head = {_MAGIC: MAGIC, _NUM_SLOTS: NUM_SLOTS, _SINCE_US: time.time_ns() // 1000}
        for cell, value in head.items():
            file.seek(cell * _CELL)
            file.write(value.to_bytes(_CELL, "little", signed=True))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _put_aside_unless_whole(path: Path, boot_id: str) -> None:
    """Put the record aside unless it is whole: what the kernel had not written when it went is not
    there.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        head = file.read(_SLOTS * _CELL)
    cells = memoryview(head).cast("q")
    is_record = len(cells) == _SLOTS and cells[_MAGIC] == MAGIC
    same_boot = head[_BOOT * _CELL : _BOOT * _CELL + len(boot_id)] == boot_id.encode()
    if not is_record or not (same_boot or cells[_CLEAN]):
        path.rename(path.with_name(f"{path.name}.{time.time_ns() // 1000}{LOST}"))


def _totals_in(cells: memoryview) -> Totals:
    at = _TOTALS[cells[_VALID]]
    return Totals(*cells[at : at + len(Totals.__struct_fields__)])


def _usage_in(cells: memoryview, slot: int) -> Usage:
    at = _SLOTS + slot * _SLOT_CELLS + _USED
    prompt, cached, generated = cells[at : at + 3]
    return Usage(
        prompt_tokens=prompt, cached_tokens=cached, generated_tokens=generated, prefilled=True
    )


def _is_taken(cells: memoryview, slot: int) -> bool:
    return cells[_SLOTS + slot * _SLOT_CELLS + _GENERATION] % 2 == 1


def _id_in(mapped: mmap.mmap, cells: memoryview, slot: int) -> str:
    """Return whose slot it is or was; empty: nobody's so far."""
    at = _SLOTS + slot * _SLOT_CELLS
    start = (at + _ID) * _CELL
    return bytes(mapped[start : start + cells[at + _ID_LENGTH]]).decode(errors="replace")
