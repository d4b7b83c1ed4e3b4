"""Blocks of a tier for tests, each made of its number."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence

from engine.tiers.encryption import TierKey
from engine.tiers.segments import HEAD_BYTES, SegmentFormat

FORM = SegmentFormat(layout=b"L" * 32, payload_bytes=3000)
SECRET = bytes(range(32))
ENCRYPTED = SegmentFormat(FORM.layout, FORM.payload_bytes, TierKey(SECRET))


def digest_of(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=32).digest()


def payload_of(number: int, form: SegmentFormat = FORM) -> bytes:
    return (digest_of(number) * (form.payload_bytes // 32 + 1))[: form.payload_bytes]


def records_of(numbers: Sequence[int], form: SegmentFormat = FORM) -> memoryview:
    """Return records of blocks, one behind the other, in page-aligned memory, to be sealed."""
    size = form.record_bytes
    memory = memoryview(mmap.mmap(-1, max(1, len(numbers)) * size))
    for index, number in enumerate(numbers):
        record = memory[index * size : (index + 1) * size]
        record[HEAD_BYTES : HEAD_BYTES + form.payload_bytes] = payload_of(number, form)
    return memory[: len(numbers) * size]
