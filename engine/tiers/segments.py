"""The format of a segment: a file of equal records, a KV block each, that is only appended to.

    header   one page: magic, payload bytes, number, layout, a random id, CRC
    record   whole pages: magic, layout, digest; CRC of layout, digest and payload, or nonce and tag
             of a payload that is encrypted, bound to layout, digest and place; then the payload
    ...
    footer   whole pages: the digests of all records, zeros; at its very end magic, count, CRC

A sealed segment is read by its footer. One without, of a process that was killed, is read record by
record up to the first that is not whole. Numbers are little-endian, CRCs are zlib's CRC-32.

`layout` names all that makes two engines' blocks the same bytes, and the key, if they are
encrypted; a record says it, too, and its CRC or tag includes it: what another model wrote is never
taken for this one's.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from engine.tiers.buffers import PAGE_BYTES, to_pages

DIGEST_BYTES = LAYOUT_BYTES = 32
ID_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
HEAD_BYTES = 128
"""The bytes of a record before its payload."""

_HEADER = struct.Struct(f"<8sIQ32s{ID_BYTES}s")
_HEAD = struct.Struct(f"<4s32s32sI{NONCE_BYTES}s{TAG_BYTES}s")
_FOOT = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_HEADER_MAGIC, _RECORD_MAGIC, _FOOTER_MAGIC = b"TGKVSEG2", b"TGKV", b"TGKVEND1"

ReadAt = Callable[[int, int], memoryview]
"""(offset, size) -> so many bytes, or fewer at the file's end."""


class RecordCipher(Protocol):
    """Encrypts the records of one segment (`engine.tiers.encryption`)."""

    def encrypt(self, payload: memoryview, about: bytes) -> tuple[bytes, bytes]:
        """Encrypt in place, bound to `about`. Return the nonce and the tag."""

    def decrypt(self, payload: memoryview, about: bytes, nonce: bytes, tag: bytes) -> bool:
        """Undo `encrypt`. False where anything is not as it was then; the payload is of no use."""


class RecordKey(Protocol):
    """The key that those of segments are derived from."""

    def cipher_of(self, segment_id: bytes) -> RecordCipher: ...


@dataclass(frozen=True, slots=True)
class SegmentFormat:
    """The format of segments of one layout."""

    layout: bytes
    payload_bytes: int
    key: RecordKey | None = None
    """None: payloads lie there as they are."""

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

    def header(self, number: int, segment_id: bytes) -> bytes:
        fields = _HEADER.pack(_HEADER_MAGIC, self.payload_bytes, number, self.layout, segment_id)
        return (fields + _CRC.pack(crc32(fields))).ljust(PAGE_BYTES, b"\0")

    def footer(self, digests: Sequence[bytes]) -> bytes:
        text = b"".join(digests)
        foot = _FOOT.pack(_FOOTER_MAGIC, len(digests), self._crc(text))
        return text.ljust(to_pages(len(text) + len(foot)) - len(foot), b"\0") + foot

    def cipher_of(self, segment_id: bytes) -> RecordCipher | None:
        """Return what encrypts the records of a segment; None: nothing does."""
        return None if self.key is None else self.key.cipher_of(segment_id)

    def seal(
        self, record: memoryview, digest: bytes, slot: int, cipher: RecordCipher | None
    ) -> None:
        """Encrypt the payload of a record, if it is to be, and write its head."""
        payload, crc, nonce, tag = self._payload(record), 0, b"", b""
        if cipher is None:
            crc = self._crc(digest, payload)
        else:
            nonce, tag = cipher.encrypt(payload, self._place(digest, slot))
        _HEAD.pack_into(record, 0, _RECORD_MAGIC, self.layout, digest, crc, nonce, tag)

    def unseal(self, record: memoryview, slot: int, cipher: RecordCipher | None) -> bytes | None:
        """Make the payload of a record what it was before `seal`, and return its digest; None, and
        the payload is of no use, when it is not whole, or of another layout, place or key."""
        magic, layout, digest, crc, nonce, tag = _HEAD.unpack_from(record)
        if magic != _RECORD_MAGIC or layout != self.layout:
            return None
        payload = self._payload(record)
        if cipher is None:
            is_whole = self._crc(digest, payload) == crc
        else:
            is_whole = cipher.decrypt(payload, self._place(digest, slot), nonce, tag)
        return digest if is_whole else None

    def read_header(self, header: memoryview) -> bytes | None:
        """Return the id of the segment whose file begins so; None: it is no segment of this
        layout."""
        if len(header) < _HEADER.size + _CRC.size:
            return None
        fields = bytes(header[: _HEADER.size])
        magic, payload_bytes, _, layout, segment_id = _HEADER.unpack(fields)
        is_whole = _CRC.unpack_from(header, _HEADER.size) == (crc32(fields),)
        mine = (_HEADER_MAGIC, self.payload_bytes, self.layout)
        return segment_id if is_whole and (magic, payload_bytes, layout) == mine else None

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

    def read_records(
        self, read_at: ReadAt, file_bytes: int, cipher: RecordCipher | None
    ) -> list[bytes]:
        """Return the digests of the records up to the first that is not whole."""
        digests: list[bytes] = []
        while self.offset_of(len(digests) + 1) <= file_bytes:
            slot = len(digests)
            record = read_at(self.offset_of(slot), self.record_bytes)
            if len(record) < self.record_bytes:
                break
            if (digest := self.unseal(record, slot, cipher)) is None:
                break
            digests.append(digest)
        return digests

    def _payload(self, record: memoryview) -> memoryview:
        return record[HEAD_BYTES : HEAD_BYTES + self.payload_bytes]

    def _place(self, digest: bytes, slot: int) -> bytes:
        """Return what an encrypted payload is bound to, besides its segment, whose key it has."""
        return self.layout + digest + slot.to_bytes(8, "little")

    def _crc(self, *parts: bytes | memoryview) -> int:
        crc = crc32(self.layout)
        for part in parts:
            crc = crc32(part, crc)
        return crc
