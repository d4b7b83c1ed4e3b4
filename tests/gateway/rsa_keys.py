"""A few RSA keys for all tests of a process: making one takes 100 ms, reading one 30, and an
application on an empty database makes two and reads one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from joserfc.jwk import RSAKey

NUM_KEYS = 16
"""Keys of each size. A test that makes more at one moment of its clock gets the first one again."""


@contextmanager
def few_keys() -> Iterator[None]:
    binding = RSAKey.binding
    make, numbers = binding.generate_private_key, count()

    @cache
    def made(size: int, number: int) -> RSAPrivateKey:
        return make(size)

    def generate(size: int) -> RSAPrivateKey:
        return made(size, next(numbers) % NUM_KEYS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binding, "generate_private_key", staticmethod(generate))
        patch.setattr(binding, "import_from_bytes", staticmethod(cache(binding.import_from_bytes)))
        yield
