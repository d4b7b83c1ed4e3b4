"""Passwords, by argon2id (RFC 9106), in threads of their own.

A hash takes 64 MiB and a good part of a second on purpose: so few run at once, few more may wait,
and who comes after them is told to come back. Whether an account exists cannot be told from the
time: where there is no hash, one of nobody's is checked. Knows no table.
"""

from __future__ import annotations

import asyncio
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from argon2.profiles import RFC_9106_LOW_MEMORY

PARAMETERS = RFC_9106_LOW_MEMORY
MIN_LENGTH = 12
"""NIST SP 800-63B-4 asks for 15 where a password stands alone, 8 beside another factor; the
throttle (`throttle`) makes up for what is between."""
MAX_LENGTH = 256
T = TypeVar("T")
THREADS = 2
MAX_WAITING = 32


class PasswordsBusy(Exception):
    """More passwords are being checked than this process takes on."""


class WeakPassword(Exception):
    """Its text is for people."""


def check_strength(password: str, *others: str) -> None:
    """Check a new password; `others`: what it may not be, such as the address of its user.

    Raises: WeakPassword.
    """
    if not MIN_LENGTH <= len(password) <= MAX_LENGTH:
        raise WeakPassword(f"A password has {MIN_LENGTH} to {MAX_LENGTH} characters.")
    plain = password.casefold()
    if len(set(plain)) < 4 or any(plain == other.casefold() for other in others):
        raise WeakPassword("This password is too easy to guess.")


def prepare(password: str) -> bytes:
    """Normalize a password to the same bytes whatever keyboard it was typed on (NIST SP 800-63B,
    3.1.1.2)."""
    return unicodedata.normalize("NFKC", password).encode("utf-8", "surrogatepass")


class Passwords:
    """One per process."""

    def __init__(self, hasher: PasswordHasher | None = None) -> None:
        self._hasher = hasher or PasswordHasher.from_parameters(PARAMETERS)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="argon2")
        self._waiting = 0
        self._of_nobody = self._hasher.hash(b"nobody has this password")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def hash(self, password: str) -> str:
        """Raises: PasswordsBusy."""
        return await self._run(lambda: self._hasher.hash(prepare(password)))

    async def verify(self, password: str, stored: str | None) -> bool:
        """True if the password is right; stored None: nobody's; it takes as long, and is wrong.

        Raises: PasswordsBusy.
        """
        if len(password) > MAX_LENGTH:
            password, stored = password[:MAX_LENGTH], None
        against = self._of_nobody if stored is None else stored
        found = await self._run(lambda: self._is(password, against))
        return found and stored is not None

    def _is(self, password: str, stored: str) -> bool:
        try:
            return self._hasher.verify(stored, prepare(password))
        except (VerificationError, InvalidHashError):
            return False

    async def _run(self, work: Callable[[], T]) -> T:
        if self._waiting >= THREADS + MAX_WAITING:
            raise PasswordsBusy
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1
