"""The slots that an upstream has: of one process, or lent among all of one home.

Knows no request: a slot is a number.

Shared, a slot is one byte of a file, taken by a POSIX record lock: never more than there are, and
free again the moment its process dies, however it does. A lock call takes 1.5 to 5 us (1,024
slots, of others' in one run or every second one), so nobody asks for all of them: the byte itself,
mapped, says whether its slot is taken, which its holder alone writes and no one trusts. A look
goes over all bytes in less than a microsecond and locks what it finds. The bytes of the dead say
taken for good, so where no other is free, MAX_LOOK slots are locked whatever they say.

Nobody is told of a slot that comes free: who waits looks again after LOOK_AGAIN_S. A process
takes beyond its share what is free; what it gives back of that it leaves alone for REST_S, longer
than the others need to look. So an idle process lends all that it has, and gets its share back as
the others' requests end.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.01
REST_S = 2.5 * LOOK_AGAIN_S
MAX_LOOK = 64
"""Slots that are tried before the others are left to the next time."""
LOG_EVERY_S = 60.0
"""A refusal by the kernel is logged at most this often."""

_FREE, _TAKEN = 0, 1


class Slots(Protocol):
    @property
    def look_again_s(self) -> float | None:
        """Return the seconds after which a slot may be free that this process did not give back;
        None: there is none such."""
        ...

    @property
    def num_taken(self) -> int:
        """Count the slots that this process has taken."""
        ...

    def is_any_free(self) -> bool:
        """Tell whether `take` would find one, now or as soon as this process has rested."""
        ...

    def take(self) -> int | None:
        """Take a slot. None: there is none, or none for this process now."""
        ...

    def give_back(self, slot: int) -> None: ...

    def close(self) -> None: ...


class OwnSlots:
    """The slots of an upstream that nobody shares."""

    look_again_s: float | None = None

    def __init__(self, number: int) -> None:
        self._number = number
        self._free = list(range(number))

    @property
    def num_taken(self) -> int:
        return self._number - len(self._free)

    def is_any_free(self) -> bool:
        return bool(self._free)

    def take(self) -> int | None:
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def close(self) -> None:
        pass


class SharedSlots:
    """The slots of a file that processes share; one object for each file in a process: POSIX drops
    all locks of a process on a file as soon as it closes that file once. `share`: what it may take
    again at once; the shares of all are no more than there are slots."""

    look_again_s: float | None = LOOK_AGAIN_S

    def __init__(
        self,
        path: Path,
        number: int,
        *,
        share: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert 1 <= share <= number, f"a share of {share} of {number} slots"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(self._file, 0, number)  # never shorter than another has mapped it
        self._marks = mmap.mmap(self._file, number)
        self._number, self._share, self._clock = number, share, clock
        self._taken: set[int] = set()
        self._next = random.Random().randrange(number)
        """The slot at which `_find_of_dead` continues."""
        self._rests_until = 0.0
        self._logs_from = 0.0

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    def is_any_free(self) -> bool:
        if self._file < 0:
            return False
        if self._marks.find(_FREE.to_bytes()) >= 0:
            return True
        slot = self._find_of_dead()
        if slot is not None:
            self._unlock(slot)
        return slot is not None

    def take(self) -> int | None:
        if self._file < 0 or self._is_resting():
            return None
        slot = self._find_marked_free()
        if slot is None:
            slot = self._find_of_dead()
        if slot is not None:
            self._marks[slot] = _TAKEN
            self._taken.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        if len(self._taken) > self._share:
            self._rests_until = self._clock() + REST_S
        if slot in self._taken:  # not closed meanwhile
            self._taken.remove(slot)
            self._unlock(slot)

    def close(self) -> None:
        """Free all that is taken. Idempotent."""
        if self._file >= 0:
            for slot in self._taken:
                self._marks[slot] = _FREE
            self._marks.close()
            os.close(self._file)
            self._file = -1
            self._taken.clear()

    def _is_resting(self) -> bool:
        return len(self._taken) >= self._share and self._clock() < self._rests_until

    def _find_marked_free(self) -> int | None:
        """Find a slot that is marked free, and lock it. Another may be about to mark it, or to
        unlock it: then the next one."""
        slot = -1
        for _ in range(MAX_LOOK):
            slot = self._marks.find(_FREE.to_bytes(), slot + 1)
            if slot < 0:
                return None
            if self._lock(slot):
                return slot
        return None

    def _find_of_dead(self) -> int | None:
        """Find a slot of a process that is dead, and lock it. All are looked at in number /
        MAX_LOOK calls."""
        for _ in range(min(MAX_LOOK, self._number)):
            slot = self._next
            self._next = (slot + 1) % self._number
            if slot not in self._taken and self._lock(slot):
                return slot
        return None

    def _lock(self, slot: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except (BlockingIOError, PermissionError):  # another has it: EAGAIN or EACCES (fcntl(2))
            return False
        except OSError as error:  # ENOLCK: the kernel has none left, for now
            self._complain("taken", error)
            return False
        return True

    def _unlock(self, slot: int) -> None:
        self._marks[slot] = _FREE  # while nobody else may write it
        try:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, slot)
        except OSError as error:  # ENOLCK: unlocking in the middle of a run makes two of one
            self._marks[slot] = _TAKEN  # for others, until this process takes it once more
            self._complain("given back", error)

    def _complain(self, what: str, error: OSError) -> None:
        now = self._clock()
        if now >= self._logs_from:
            self._logs_from = now + LOG_EVERY_S
            log.warning("a slot of an upstream cannot be %s: %s", what, error)
