"""The places that an upstream has: of one process, or lent among all of one home.

Above: `waiting_room`. Below: the kernel. Knows no request: a place is a number.

Shared, a place is one byte of a file, taken by a POSIX record lock: a call of about a microsecond,
never more than there are, and free again the moment its process dies, however it does. Nobody is
told of a place that comes free: who waits looks again after LOOK_AGAIN_S. A process takes beyond
its share what is free; what it gives back of that it leaves alone for REST_S, longer than the
others need to look. So an idle process lends all that it has, and gets its share back as the
others' requests end.
"""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

LOOK_AGAIN_S = 0.01
REST_S = 2.5 * LOOK_AGAIN_S
MAX_LOOK = 64
"""Places that are tried before the others are left to the next time."""


class Places(Protocol):
    @property
    def look_again_s(self) -> float | None:
        """After which one may be free that this process did not give back; None: there is none
        such."""
        ...

    @property
    def num_taken(self) -> int:
        """By this process."""
        ...

    def is_any_free(self) -> bool:
        """Whether `take` would find one."""
        ...

    def take(self) -> int | None:
        """None: there is none, or none for this process now."""
        ...

    def give_back(self, place: int) -> None: ...

    def close(self) -> None: ...


class OwnPlaces:
    """Nobody else's."""

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

    def give_back(self, place: int) -> None:
        self._free.append(place)

    def close(self) -> None:
        pass


class SharedPlaces:
    """One for each file in a process: POSIX drops all locks of a process on a file as soon as it
    closes that file once. `share`: what it may take again at once; the shares of all are no more
    than there are places."""

    look_again_s: float | None = LOOK_AGAIN_S

    def __init__(
        self,
        path: Path,
        number: int,
        *,
        share: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert 1 <= share <= number, f"a share of {share} of {number} places"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._number, self._share, self._clock = number, share, clock
        self._taken: set[int] = set()
        self._next = random.Random().randrange(number)
        self._rests_until = 0.0

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    def is_any_free(self) -> bool:
        place = self.take()
        if place is not None:
            self._let_go(place)
        return place is not None

    def take(self) -> int | None:
        if self._file < 0 or self._is_resting():
            return None
        for _ in range(min(MAX_LOOK, self._number)):
            place = self._next
            self._next = (place + 1) % self._number
            if place not in self._taken and self._lock(place):
                self._taken.add(place)
                return place
        return None

    def give_back(self, place: int) -> None:
        if len(self._taken) > self._share:
            self._rests_until = self._clock() + REST_S
        if place in self._taken:  # not closed meanwhile
            self._let_go(place)

    def close(self) -> None:
        """All that is taken is free. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._taken.clear()

    def _is_resting(self) -> bool:
        return len(self._taken) >= self._share and self._clock() < self._rests_until

    def _let_go(self, place: int) -> None:
        self._taken.remove(place)
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

    def _lock(self, place: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except (BlockingIOError, PermissionError):  # another has it: EAGAIN or EACCES (fcntl(2))
            return False
        return True
