"""Opens the tiers of an engine's KV cache, and measures what computing takes, so that nothing is
read that is computed sooner.
"""

from __future__ import annotations

import errno
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config import EngineConfig, ResolvedConfig
from engine.core.kv_layout import HASHES, layout_digest
from engine.errors import ConfigError
from engine.kernels.attention.types import KVLayer
from engine.kv_cache.prefix_cache import PrefixCache
from engine.protocol import SamplingParams
from engine.runner.encoder_runner import EncoderRunner
from engine.runner.memory.kv_blocks import KVBlockCopier
from engine.runner.model_runner import ModelRunner
from engine.scheduling.prefix_loader import PrefixLoader
from engine.scheduling.step_plan import ScheduledSequence, SchedulerOutput
from engine.sequence import Sequence as EngineSequence
from engine.tiers.buffers import PAGE_BYTES
from engine.tiers.disk import DiskTier, log_off
from engine.tiers.host import MIN_CHUNKS, HostTier
from engine.tiers.policy import PrefillCosts, ReadCosts
from engine.tiers.sources import Signal
from engine.transfer.peers import PeerSource

if TYPE_CHECKING:  # its library is only needed by who encrypts
    from engine.tiers.encryption import TierKey

log = logging.getLogger(__name__)

MEASURED_TOKENS = 256
"""The tokens of a measured step; eight times as many lie before those of the second one."""
MEASURED_BLOCKS = 64
STEPS_AHEAD = 2
"""The blocks that so many full steps may evict are copied to host memory before they do."""
NEVER_WORKS = {
    *(errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP),
    errno.EBUSY,  # as many engines as may share a path do
}
"""They say that a path is wrong. All others may be over at the next start: a disk that is full,
read-only or broken."""


def check_tiers(config: EngineConfig, device: torch.device) -> None:
    """Raise a ConfigError before the weights are loaded, if nothing can ever be kept as asked."""
    for name in _asked(config):
        if not config.prefix_caching:
            raise ConfigError(f"{name} is set, but no prefix is cached without prefix_caching")
    if config.kv_host_bytes is not None and device.type == "cpu":
        raise ConfigError(
            "kv_host_bytes is set, but on a processor the KV cache itself is in host memory: "
            "raise kv_cache_bytes instead"
        )
    if config.kv_disk is None:
        if config.kv_disk_encrypted:
            raise ConfigError("kv_disk_encrypted is set, but kv_disk is not")
        return
    try:
        config.kv_disk.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.kv_disk) as file:
            file.write(bytes(PAGE_BYTES))
    except OSError as error:  # of a disk that is full or broken, `open_loader` tells
        _refuse_what_never_works(config.kv_disk, error)


def read_tier_key(config: EngineConfig) -> TierKey | None:
    """Return what the disk tier is encrypted under; None: it is not. Raises ConfigError."""
    if not config.kv_disk_encrypted:
        return None
    if config.kv_key_file is None:
        raise ConfigError("kv_disk_encrypted is set, but kv_key_file is not: it has the key")
    try:
        from engine.tiers.encryption import TierKey
    except ImportError as error:  # where an engine was installed without a gateway's libraries
        raise ConfigError(f"kv_disk_encrypted is set, but {error.name} is not installed") from error
    return TierKey.read(config.kv_key_file)


def open_loader(
    resolved: ResolvedConfig,
    layers: Sequence[KVLayer],
    cache: PrefixCache,
    costs: Callable[[], PrefillCosts],
    peers: PeerSource | None = None,
    key: TierKey | None = None,
) -> PrefixLoader | None:
    """Return what brings prefixes from tiers and other engines; None where none is asked for, or
    its disk fails. Raises ConfigError. layers: of all models whose KV the blocks hold. costs: as
    they are known by now. peers: None: no other engine is read. key: of the disk."""
    config = resolved.config
    for name in _asked(config):
        if not cache.enabled:
            raise ConfigError(f"{name} is set, but the model is an encoder, which caches no prefix")
        if cache.sliding_window is not None:
            raise ConfigError(f"{name} is not supported for a model with a sliding window")
    if not _asked(config) and peers is None:
        return None  # an encoder has no KV to copy
    copier, signal = KVBlockCopier(layers), Signal() if peers is None else peers.signal
    host = None if config.kv_host_bytes is None else _open_host(resolved, copier)
    disk = None
    if config.kv_disk is not None:
        disk = _open_disk(resolved, copier, config.kv_disk, signal, key)
    if host is None and disk is None and peers is None:
        return None
    window = STEPS_AHEAD * -(-config.max_num_batched_tokens // resolved.block_size)
    return PrefixLoader(
        *(cache, copier, costs),
        host=host,
        disk=disk,
        peers=peers,
        window=window,
        signal=signal,
    )


def _asked(config: EngineConfig) -> list[str]:
    """Return the names of the options that ask for a tier."""
    wanted = {"kv_host_bytes": config.kv_host_bytes, "kv_disk": config.kv_disk}
    return [name for name, value in wanted.items() if value is not None]


def _open_host(resolved: ResolvedConfig, copier: KVBlockCopier) -> HostTier:
    num_bytes, block_bytes = resolved.config.kv_host_bytes or 0, copier.block_bytes
    num_blocks = num_bytes // block_bytes
    longest = -(-resolved.max_model_len // resolved.block_size)
    if num_blocks < max(longest, MIN_CHUNKS):
        raise ConfigError(
            f"kv_host_bytes is {num_bytes}: a sequence of {longest} blocks takes "
            f"{max(longest, MIN_CHUNKS) * block_bytes}"
        )
    try:
        rows = copier.host_rows(num_blocks)
    except (RuntimeError, MemoryError) as error:  # torch's is a RuntimeError, with a trace in it
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"kv_host_bytes is {num_bytes}, which cannot be had: {reason}") from error
    return HostTier(rows, measure_copies(copier, rows))


def _open_disk(
    resolved: ResolvedConfig,
    copier: KVBlockCopier,
    path: Path,
    signal: Signal,
    key: TierKey | None,
) -> DiskTier | None:
    """None where the disk is full or broken, which the log says."""
    try:
        return DiskTier(
            path,
            max_bytes=resolved.config.kv_disk_bytes,
            layout=layout_digest(resolved, copier.block_bytes, path / HASHES),
            payload_bytes=copier.block_bytes,
            min_blocks=-(-resolved.max_model_len // resolved.block_size),
            signal=signal,
            key=key,
        )
    except OSError as error:
        _refuse_what_never_works(path, error)
        log_off(path, error)
        return None


def _refuse_what_never_works(path: Path, error: OSError) -> None:
    """Raise a ConfigError if it is the path that is wrong, and not its disk."""
    if error.errno in NEVER_WORKS:
        raise ConfigError(f"kv_disk {path}: {error.strerror}") from error


def measure_prefill(runner: ModelRunner | EncoderRunner, resolved: ResolvedConfig) -> PrefillCosts:
    """Compute a prompt's beginning and a later part, over blocks that nobody owns yet."""
    room = min(resolved.num_blocks * resolved.block_size, resolved.max_model_len)
    num_tokens = max(1, min(MEASURED_TOKENS, resolved.config.max_num_batched_tokens, room // 2))
    depth = min(8 * num_tokens, room - num_tokens)
    steps = [_part(start, num_tokens, resolved.block_size) for start in (0, 0, depth)]
    _, first_s, deep_s = (_time(runner, step) for step in steps)  # the first one loads code
    pair_s = max(0.0, deep_s - first_s) / (num_tokens * max(1, depth))
    token_s = max(first_s / num_tokens - pair_s * num_tokens / 2, first_s / num_tokens / 2)
    return PrefillCosts(token_s, pair_s)


def measure_copies(copier: KVBlockCopier, rows: NDArray[np.uint8]) -> ReadCosts:
    """Copy host memory into blocks that nobody owns yet: one, then a number of them."""
    num_blocks = min(MEASURED_BLOCKS, len(rows), copier.num_blocks)

    def copy_s(num: int) -> float:
        copier.synchronize()
        started_s = time.perf_counter()
        copier.scatter([*range(num)], rows[:num])
        copier.synchronize()
        return max(time.perf_counter() - started_s, 1e-6)

    copy_s(num_blocks)  # which loads code, and touches the memory
    return ReadCosts(copy_s(1), num_blocks * copier.block_bytes / copy_s(num_blocks))


def describe(loader: PrefixLoader, costs: PrefillCosts, block_size: int) -> str:
    """Say what was measured, for the log."""
    tiers = [each for each in (loader.host, loader.disk) if each is not None]
    texts = [
        f"{each.place}: {each.num_blocks} blocks of at most {each.max_blocks}, read at "
        f"{each.costs.bytes_per_s / 1e6:,.0f} MB/s"
        for each in tiers
    ]
    kv_bytes_per_s = tiers[0].record_bytes / costs.seconds(0, block_size)
    made = f"computing makes {kv_bytes_per_s / 1e6:,.0f} MB/s at the beginning of a prompt"
    return "; ".join([*texts, made])


def _part(start: int, num_tokens: int, block_size: int) -> SchedulerOutput:
    end = start + num_tokens
    seq = EngineSequence(
        request_id="measured",
        index=0,
        order=(0, 0),
        prompt_token_ids=[0] * end,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        seed=0,
        cache_salt="",
    )
    seq.block_table = list(range(-(-end // block_size)))
    entry = ScheduledSequence(
        seq, num_tokens, start=start, samples=True, output_index=0, attempt=0, embeds=False
    )
    return SchedulerOutput(scheduled=[entry], preempted=[], num_tokens=num_tokens)


def _time(runner: ModelRunner | EncoderRunner, step: SchedulerOutput) -> float:
    started_s = time.perf_counter()
    runner.collect(runner.launch(step))
    return time.perf_counter() - started_s
