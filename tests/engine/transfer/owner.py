"""An engine's side of a transfer without an engine: a prefix cache over a pool whose blocks have
content that says which they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.kv_cache.block_holds import BlockHolds, raise_generation
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_cache import PrefixCache
from engine.protocol import SamplingParams
from engine.sequence import Sequence
from engine.transfer.connection import PeerConnection
from engine.transfer.peer_tls import PeerTls
from engine.transfer.serving import BlockServer
from engine.transfer.shared_pool import SharedPool

LAYOUT = b"L" * 32
BLOCK_SIZE = 4
PART_BYTES = (48, 80) * 12
"""Many and small: a copy takes long, and is interrupted."""
BLOCK_BYTES = sum(PART_BYTES)

_numbers = itertools.count()


def sequence(prompt: Items[int], salt: str = "") -> Sequence:
    return Sequence(
        request_id="r",
        index=0,
        order=(next(_numbers), 0),
        prompt_token_ids=[*prompt],
        sampling=SamplingParams(max_tokens=1),
        seed=0,
        cache_salt=salt,
    )


def content_of(digest: bytes) -> NDArray[np.uint8]:
    """Return the bytes of the block with this digest."""
    return np.frombuffer((digest * (BLOCK_BYTES // 32 + 1))[:BLOCK_BYTES], np.uint8)


class Owner:
    """Computes blocks, and lets others read them. `close` ends that."""

    def __init__(self, folder: Path, num_blocks: int = 24, max_held: int = 8) -> None:
        self.pool = SharedPool(num_blocks, PART_BYTES)
        self.now_s = 0.0
        on_free = partial(raise_generation, self.pool.generations)
        self.cache = PrefixCache(BlockPool(num_blocks, on_free=on_free), BLOCK_SIZE)
        self.holds = BlockHolds(
            self.cache, self.pool.generations, max_blocks=max_held, clock=lambda: self.now_s
        )
        self._folder = folder
        self._servers: list[BlockServer] = []

    def compute(self, prompt: Items[int], salt: str = "") -> list[bytes]:
        """Compute what is not cached of a prompt, and leave it in the cache. Return the digests of
        its blocks."""
        cache, seq = self.cache, sequence(prompt, salt)
        cache.adopt(seq, cache.match(seq))
        first = len(seq.block_table)
        assert cache.grow(seq, seq.num_tokens)
        num_full = seq.num_tokens // BLOCK_SIZE
        for index in range(first, num_full):
            self._write(seq.block_table[index], content_of(cache.digest(seq, index)))
        seq.num_computed_tokens = seq.num_tokens
        cache.register(seq)
        digests = seq.block_digests[:num_full]
        cache.release(seq)
        return digests

    def serve(
        self, *, offers_memory: bool = True, token: str = "", tls: PeerTls | None = None
    ) -> BlockServer:
        """`tls`: it serves over TCP."""
        here = f"unix:{self._folder}/kv-{next(_numbers)}.sock"
        server = BlockServer(
            here if tls is None else "tcp:127.0.0.1:0",
            self.holds,
            self.pool,
            engine_id="owner",
            layout=LAYOUT,
            block_bytes=BLOCK_BYTES,
            num_blocks=self.pool.shape.num_blocks,
            token=token,
            pool=self.pool,
            offers_memory=offers_memory,
            tls=tls,
        )
        self._servers.append(server)
        return server

    def close(self) -> None:
        for server in self._servers:
            server.close()
        self.pool.close()

    def _write(self, block: int, content: NDArray[np.uint8]) -> None:
        start = 0
        for number, num_bytes in enumerate(PART_BYTES):
            part = self.pool.part(number)
            part[block * num_bytes : (block + 1) * num_bytes] = content[start:][
                :num_bytes
            ].tobytes()
            start += num_bytes


def connect(
    address: str,
    *,
    token: str = "",
    layout: bytes = LAYOUT,
    timeout_s: float = 30.0,
    tls: PeerTls | None = None,
) -> PeerConnection:
    return PeerConnection(
        address, token=token, layout=layout, block_bytes=BLOCK_BYTES, timeout_s=timeout_s, tls=tls
    )
