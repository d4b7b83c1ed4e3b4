"""Names what a prompt begins with: a digest for each of its blocks, a key for each of its spans.

A span is SPAN_BLOCKS blocks. The digest of a block is BLAKE2b-256 (RFC 7693) of the digest before
its span and of the span's tokens up to the block's end, each as 4 bytes, little-endian. Before the
first span stands a digest of the salt. So a digest names the whole text up to the block's end, and
tenants never meet.

The engine shares blocks by their digests. A gateway that only wants to know which engine has a
prompt's beginning hashes each token once, a span at a time, and comes to the same keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

SPAN_BLOCKS = 8
KEY_BYTES = 8
"""The bytes of a digest that make a span's key: two of a billion spans share one with a chance of
3 %, which costs a wrong guess about where a prompt is cached."""
_DIGEST_BYTES = 32
_TOKEN_BYTES = 4


def root_digest(salt: str) -> bytes:
    """Return what stands before a first span: BLAKE2b-256 of the salt's UTF-8."""
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()


def block_digests(before: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the digest of each full block among the tokens, which begin at a span's beginning and
    do not reach beyond its end. `before`: the digest of the span before, or the root's."""
    packed, step = _packed(token_ids), block_size * _TOKEN_BYTES
    hasher = blake2b(before, digest_size=_DIGEST_BYTES)
    digests = []
    for start in range(0, len(packed) - step + 1, step):
        hasher.update(packed[start : start + step])
        digests.append(hasher.digest())
    return digests


def span_key(digest: bytes) -> bytes:
    """Return the key of the span whose last block has this digest."""
    return digest[:KEY_BYTES]


def span_keys(salt: str, token_ids: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Return the key of each whole span as a number of 64 bits (the bytes are little-endian)."""
    step = SPAN_BLOCKS * block_size * _TOKEN_BYTES
    if len(token_ids) * _TOKEN_BYTES < step:
        return ()
    packed, digest, keys = _packed(token_ids), root_digest(salt), []
    for start in range(0, len(packed) - step + 1, step):
        digest = blake2b(digest + packed[start : start + step], digest_size=_DIGEST_BYTES).digest()
        keys.append(span_key(digest))
    return tuple(int.from_bytes(key, "little") for key in keys)


def _packed(token_ids: Sequence[int]) -> bytes:
    packed = array("I", token_ids)
    assert packed.itemsize == _TOKEN_BYTES, "an unsigned int has 4 bytes wherever CPython runs"
    return packed.tobytes()
