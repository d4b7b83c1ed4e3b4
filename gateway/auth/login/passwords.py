"""Hashes and verifies passwords with argon2id (RFC 9106), in threads of their own.

A hash takes 64 MiB and much of a second on purpose: so few run at once, few more may wait, and
further callers are refused. The time does not tell whether an account exists: for one without a
hash a dummy hash is verified.
"""

from __future__ import annotations

import asyncio
import base64
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from argon2.low_level import ARGON2_VERSION
from argon2.profiles import RFC_9106_LOW_MEMORY

PARAMETERS = RFC_9106_LOW_MEMORY
MIN_LENGTH = 12
"""NIST SP 800-63B-4 wants 15 characters if a password is the only factor, 8 beside another one;
`throttle` makes up for the difference."""
MAX_LENGTH = 256
T = TypeVar("T")
THREADS = 2
MAX_WAITING = 32


class PasswordsBusy(Exception):
    """Too many passwords are being checked in this process."""


class WeakPassword(Exception):
    """The password is refused; the text is for its user."""


def check_strength(password: str, *others: str) -> None:
    """Check a new password; `others`: texts that it may not be, such as its user's e-mail address.

    Raises: WeakPassword.
    """
    if not MIN_LENGTH <= len(password) <= MAX_LENGTH:
        raise WeakPassword(f"A password has {MIN_LENGTH} to {MAX_LENGTH} characters.")
    plain = password.casefold()
    if len(set(plain)) < 4 or any(plain == other.casefold() for other in others):
        raise WeakPassword("This password is too easy to guess.")


def prepare(password: str) -> bytes:
    """Return the normalized bytes of a password, independent of the keyboard (NIST SP 800-63B,
    3.1.1.2)."""
    return unicodedata.normalize("NFKC", password).encode("utf-8", "surrogatepass")


def dummy_hash(hasher: PasswordHasher) -> str:
    """Return a hash that no password has: zeros. To verify it takes as long as any other one of
    `hasher`, and to make it takes nothing, as each process does."""
    cost = f"m={hasher.memory_cost},t={hasher.time_cost},p={hasher.parallelism}"
    salt, zeros = (
        base64.b64encode(bytes(length)).decode().rstrip("=")
        for length in (hasher.salt_len, hasher.hash_len)
    )
    return f"$argon2id$v={ARGON2_VERSION}${cost}${salt}${zeros}"


class Passwords:
    """The password hashing of one process."""

    def __init__(self, hasher: PasswordHasher | None = None) -> None:
        self._hasher = hasher or PasswordHasher.from_parameters(PARAMETERS)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="argon2")
        self._waiting = 0
        self._dummy_hash = dummy_hash(self._hasher)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def hash(self, password: str) -> str:
        """Raises: PasswordsBusy."""
        return await self._run(lambda: self._hasher.hash(prepare(password)))

    async def verify(self, password: str, stored: str | None) -> bool:
        """True if the password is right. `stored` None: no account; it takes as long, and is False.

        Raises: PasswordsBusy.
        """
        if len(password) > MAX_LENGTH:
            password, stored = password[:MAX_LENGTH], None
        compared = self._dummy_hash if stored is None else stored
        is_right = await self._run(lambda: self._matches(password, compared))
        return is_right and stored is not None

    def _matches(self, password: str, stored: str) -> bool:
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
