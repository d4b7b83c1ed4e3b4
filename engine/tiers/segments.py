"""The format of a segment: a file of equal records, a KV block each, that is only appended to.

    header   one page: magic, payload bytes, number, layout, CRC
    record   whole pages: magic, layout, digest, CRC of layout, digest and payload; then the payload
    ...
    footer   whole pages: the digests of all records, zeros; at its very end magic, count, CRC

A sealed segment is read by its footer. One without, of a process that was killed, is read record by
record up to the first that is not whole. Numbers are little-endian, CRCs are zlib's CRC-32.

`layout` names all that makes two engines' blocks the same bytes; a record says it, too, and its CRC
includes it: what another model wrote is never taken for this one's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

from engine.tiers.buffers import PAGE_BYTES, to_pages

DIGEST_BYTES = LAYOUT_BYTES = 32
HEAD_BYTES = 128
"""The bytes of a record before its payload."""

_HEADER = struct.Struct("<8sIQ32s")
_HEAD = struct.Struct("<4s32s32sI")
_FOOT = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_HEADER_MAGIC, _RECORD_MAGIC, _FOOTER_MAGIC = b"TGKVSEG1", b"TGKV", b"TGKVEND1"

ReadAt = Callable[[int, int], memoryview]
"""(offset, size) -> so many bytes, or fewer at the file's end."""


@dataclass(frozen=True, slots=True)
class SegmentFormat:
    """The format of segments of one layout."""

    layout: bytes
    payload_bytes: int

    @property
    def record_bytes(self) -> int:
        return to_pages(HEAD_BYTES + self.payload_bytes)

    def offset_of(self, slot: int) -> int:
        return PAGE_BYTES + slot * self.record_bytes

    def capacity(self, segment_bytes: int) -> int:
        """Return how many records a segment of so many bytes has, its footer included."""
        num_records = (segment_bytes - PAGE_BYTES) // self.record_bytes
        while num_records > 0 and self.sealed_bytes(num_records) > segment_bytes:
            num_records -= 1
        return num_records

    def sealed_bytes(self, num_records: int) -> int:
        return self.offset_of(num_records) + to_pages(num_records * DIGEST_BYTES + _FOOT.size)

    def header(self, number: int) -> bytes:
        fields = _HEADER.pack(_HEADER_MAGIC, self.payload_bytes, number, self.layout)
        return (fields + _CRC.pack(crc32(fields))).ljust(PAGE_BYTES, b"\0")

    def footer(self, digests: Sequence[bytes]) -> bytes:
        text = b"".join(digests)
        foot = _FOOT.pack(_FOOTER_MAGIC, len(digests), self._crc(text))
        return text.ljust(to_pages(len(text) + len(foot)) - len(foot), b"\0") + foot

    def seal(self, record: memoryview, digest: bytes) -> None:
        """Write the head of a record whose payload is there."""
        crc = self._crc(digest, record[HEAD_BYTES : HEAD_BYTES + self.payload_bytes])
        _HEAD.pack_into(record, 0, _RECORD_MAGIC, self.layout, digest, crc)

    def digest_of(self, record: memoryview) -> bytes | None:
        """Return the digest of a record; None when it is not whole, or not of this layout."""
        magic, layout, digest, crc = _HEAD.unpack_from(record)
        if magic != _RECORD_MAGIC or layout != self.layout:
            return None
        payload = record[HEAD_BYTES : HEAD_BYTES + self.payload_bytes]
        return digest if self._crc(digest, payload) == crc else None

    def is_segment(self, header: memoryview) -> bool:
        """Whether a file that begins so is a segment of this layout."""
        if len(header) < _HEADER.size + _CRC.size:
            return False
        fields = bytes(header[: _HEADER.size])
        magic, payload_bytes, _, layout = _HEADER.unpack(fields)
        is_whole = _CRC.unpack_from(header, _HEADER.size) == (crc32(fields),)
        mine = (_HEADER_MAGIC, self.payload_bytes, self.layout)
        return is_whole and (magic, payload_bytes, layout) == mine

    def read_footer(self, read_at: ReadAt, file_bytes: int) -> list[bytes] | None:
        """Return the digests of a sealed segment's records; None when it was not sealed."""
        if file_bytes % PAGE_BYTES or file_bytes < self.sealed_bytes(0):
            return None  # and what is not aligned cannot be read past the page cache
        last = read_at(file_bytes - PAGE_BYTES, PAGE_BYTES)
        magic, count, crc = _FOOT.unpack_from(last, PAGE_BYTES - _FOOT.size)
        if magic != _FOOTER_MAGIC or file_bytes != self.sealed_bytes(count):
            return None
        start = self.offset_of(count)
        text = bytes(read_at(start, file_bytes - start)[: count * DIGEST_BYTES])
        if self._crc(text) != crc:
            return None
        return [text[i : i + DIGEST_BYTES] for i in range(0, len(text), DIGEST_BYTES)]

    def read_records(self, read_at: ReadAt, file_bytes: int) -> list[bytes]:
        """Return the digests of the records up to the first that is not whole."""
        digests: list[bytes] = []
        while self.offset_of(len(digests) + 1) <= file_bytes:
            record = read_at(self.offset_of(len(digests)), self.record_bytes)
            if len(record) < self.record_bytes or (digest := self.digest_of(record)) is None:
                break
            digests.append(digest)
        return digests

    def _crc(self, *parts: bytes | memoryview) -> int:
        crc = crc32(self.layout)
        for part in parts:
            crc = crc32(part, crc)
        return crc
