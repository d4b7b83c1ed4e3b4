"""Opens what other engines read this one's KV blocks by: memory that they can map, holds, a socket.

On a CPU the whole pool lies in a file of memory. On another device it stays where it is: blocks are
copied to the host and sent.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config import EngineConfig, ResolvedConfig
from engine.core.kv_layout import HASHES, layout_digest
from engine.errors import ConfigError
from engine.kernels.attention.types import KVLayer
from engine.kv_cache.block_holds import HELD_SHARE, BlockHolds, Generations
from engine.kv_cache.prefix_cache import PrefixCache
from engine.protocol import PeerStatus
from engine.runner.memory.kv_blocks import KVBlockCopier
from engine.scheduling.prefix_loader import PrefixLoader
from engine.tiers.sources import Signal
from engine.transfer.peer_tls import PeerTls
from engine.transfer.peers import PeerSource
from engine.transfer.serving import BlockServer
from engine.transfer.shared_pool import GENERATION_BYTES, SharedPool, num_same
from engine.transport.entrance import is_local, this_host
from engine.transport.frames import TcpAddress, UnixAddress, parse_address

log = logging.getLogger(__name__)


def check_peers(config: EngineConfig) -> None:
    """Raise a ConfigError before the weights are loaded, if no other engine could read."""
    if config.peer_listen is None:
        return
    address = parse_address(config.peer_listen)
    if not config.prefix_caching:
        raise ConfigError("peer_listen is set, but no prefix is cached without prefix_caching")
    if isinstance(address, TcpAddress) and config.peer_identity is None:
        if config.peer_token_file is None:
            raise ConfigError(
                f"peer_listen {config.peer_listen}: who reads KV over TCP has to show a token, "
                "set peer_token_file"
            )
        if not (config.insecure or is_local(config.peer_listen)):
            raise ConfigError(
                f"peer_listen {config.peer_listen}: open to other machines, to which KV and the "
                "token travel in the clear; say --insecure where nobody else is on the way"
            )
    read_token(config)


def read_token(config: EngineConfig) -> str:
    """Return what engines show each other; empty where they need not. Raises ConfigError."""
    path = config.peer_token_file
    if path is None:
        return ""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"peer_token_file {path}: {why}") from error
    if not token:
        raise ConfigError(f"peer_token_file {path} is empty")
    return token


class SharedBlocks:
    """The KV memory of one engine, and who may read it."""

    def __init__(self, resolved: ResolvedConfig, part_bytes: Sequence[int], engine_id: str) -> None:
        """part_bytes: of a block, in each tensor of all models whose KV it has. Raises
        ConfigError."""
        config = resolved.config
        assert config.peer_listen is not None
        self.pool: SharedPool | None = None
        self.holds: BlockHolds | None = None
        self._resolved, self._engine_id = resolved, engine_id
        self._server: BlockServer | None = None
        self._block_bytes, self._token = sum(part_bytes), read_token(config)
        self._layout = _layout(resolved, config.peer_listen, self._block_bytes)
        self._host = this_host() if is_local(config.peer_listen) else ""
        identity = config.peer_identity
        self._tls = None if identity is None else PeerTls(identity)
        self.peers = PeerSource(
            engine_id=engine_id,
            layout=self._layout,
            block_bytes=self._block_bytes,
            token=self._token,
            signal=Signal(),
            insecure=config.insecure,
            tls=self._tls,
        )
        if resolved.device == "cpu":
            try:
                self.pool = SharedPool(resolved.num_blocks, part_bytes)
            except OSError as error:
                raise ConfigError(
                    f"the KV cache of {resolved.num_blocks} blocks cannot be allocated where other "
                    f"engines can read it: {error.strerror}"
                ) from error
        self.generations: Generations = array("Q", bytes(GENERATION_BYTES * resolved.num_blocks))
        if self.pool is not None:
            self.generations = self.pool.generations

    def parts(self) -> Iterator[memoryview] | None:
        """Yield the memory of each tensor; None: it is to be the device's."""
        return None if self.pool is None else map(self.pool.part, count())

    def hold_in(self, cache: PrefixCache) -> BlockHolds:
        """Return the holds on the blocks of this cache: so few that the longest sequence fits
        beside them."""
        resolved = self._resolved
        longest = cache.num_blocks_for(resolved.max_model_len)
        most = min(resolved.num_blocks // HELD_SHARE, resolved.num_blocks - longest)
        self.holds = BlockHolds(cache, self.generations, max_blocks=most)
        return self.holds

    def open(self, layers: Sequence[KVLayer]) -> None:
        """Let others read, from now on. Raises ConfigError."""
        config = self._resolved.config
        assert config.peer_listen is not None and self.holds is not None
        self._server = BlockServer(
            config.peer_listen,
            self.holds,
            self.pool or CopiedBlocks(KVBlockCopier(layers), self.generations),
            engine_id=self._engine_id,
            layout=self._layout,
            block_bytes=self._block_bytes,
            num_blocks=self._resolved.num_blocks,
            token=self._token,
            pool=self.pool,
            tls=self._tls,
        )
        log.info("other engines read KV blocks on %s", self._server.address)

    def close(self) -> None:
        self.peers.close()
        if self._server is not None:
            self._server.close()
        if self.pool is not None:
            self.pool.close()

    def status_of(self, loader: PrefixLoader) -> dict[str, Any]:
        """Return the fields of `ReplicaStatus` that it is for, by name."""
        if self._server is None or self.holds is None:
            return {}
        costs, block_size = self.peers.costs, self._resolved.block_size
        return {
            "peer": PeerStatus(
                address=self._server.address,
                layout=self._layout,
                read_s=costs.latency_s,
                host=self._host,
                read_token_s=self._block_bytes / block_size / costs.bytes_per_s,
            ),
            "num_held_blocks": self.holds.num_blocks,
            "num_expired_holds": self.holds.num_expired,
            "fetched_tokens": loader.hit_tokens[self.peers.name],
            "fetched_bytes": sum(self.peers.num_bytes.values()),
            "num_stale_fetches": self.peers.num_stale,
            "num_failed_fetches": self.peers.num_failed,
        }


def _layout(resolved: ResolvedConfig, listen: str, block_bytes: int) -> bytes:
    """Return the name of what the KV is. Raises ConfigError."""
    address, hashes = parse_address(listen), None
    if isinstance(address, UnixAddress):
        hashes = Path(address.path).with_name(HASHES)
    try:
        return layout_digest(resolved, block_bytes, hashes)
    except OSError as error:
        raise ConfigError(f"peer_listen {listen}: {error.strerror}") from error


class CopiedBlocks:
    """Reads blocks of a device's memory, by way of the host's."""

    def __init__(self, copier: KVBlockCopier, generations: Generations) -> None:
        self._copier, self._generations = copier, generations

    def read(
        self, blocks: Sequence[int], generations: Sequence[int], rows: NDArray[np.uint8]
    ) -> int:
        """As `BlockReader`. A block is written to by steps that are launched after its generation
        is raised, and copied before them if it was launched before: the device does one after the
        other."""
        before = num_same(self._generations, blocks, generations)
        self._copier.gather(blocks[:before], rows[:before])()
        return num_same(self._generations, blocks[:before], generations[:before])


def shares_blocks(resolved: ResolvedConfig) -> bool:
    """Whether other engines can read its blocks, where they are to."""
    if resolved.config.peer_listen is None:
        return False
    if resolved.whole_prompts or resolved.sliding_window is not None:
        log.info("peer_listen is left out: an encoder caches nothing, a sliding window no front")
        return False
    return True
