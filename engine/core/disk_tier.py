"""Opens the disk tier of an engine, and measures what computing takes, so that nothing is read that
is computed sooner.
"""

from __future__ import annotations

import errno
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
from engine.tiers.policy import PrefillCosts

log = logging.getLogger(__name__)

MEASURED_TOKENS = 256
"""The tokens of a measured step; eight times as many lie before those of the second one."""
NEVER_WORKS = {
    *(errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP),
    errno.EBUSY,  # as many engines as may share a path do
}
"""They say that a path is wrong. All others may be over at the next start: a disk that is full,
read-only or broken."""


def check_disk(config: EngineConfig) -> None:
    """Raise a ConfigError before the weights are loaded, if nothing can ever be kept there."""
    if config.kv_disk is None:
        return
    if not config.prefix_caching:
        raise ConfigError("kv_disk is set, but no prefix is cached without prefix_caching")
    try:
        config.kv_disk.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.kv_disk) as file:
            file.write(bytes(PAGE_BYTES))
    except OSError as error:  # of a disk that is full or broken, `open_loader` tells
        _refuse_what_never_works(config.kv_disk, error)


def open_loader(
    resolved: ResolvedConfig,
    layers: Sequence[KVLayer],
    cache: PrefixCache,
    costs: Callable[[], PrefillCosts],
) -> PrefixLoader | None:
    """Return what brings prefixes from the disk; None where none is asked for, or the disk fails.
    Raises ConfigError. layers: of all models whose KV the blocks hold. costs: as they are known by
    now."""
    config = resolved.config
    if config.kv_disk is None:
        return None
    if not cache.enabled:
        raise ConfigError("kv_disk is set, but the model is an encoder, which caches no prefix")
    if cache.sliding_window is not None:
        raise ConfigError("kv_disk is not supported for a model with a sliding window")
    copier = KVBlockCopier(layers)
    try:
        tier = DiskTier(
            config.kv_disk,
            max_bytes=config.kv_disk_bytes,
            layout=layout_digest(resolved, copier.block_bytes, config.kv_disk / HASHES),
            payload_bytes=copier.block_bytes,
            min_blocks=-(-resolved.max_model_len // resolved.block_size),
        )
    except OSError as error:
        _refuse_what_never_works(config.kv_disk, error)
        log_off(config.kv_disk, error)
        return None
    return PrefixLoader(cache, tier, copier, costs)


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


def describe(loader: PrefixLoader, costs: PrefillCosts, block_size: int) -> str:
    """Say what was measured, for the log."""
    tier = loader.tier
    kv_bytes_per_s = tier.record_bytes / costs.seconds(0, block_size)
    return (
        f"kv_disk {tier.path}: {tier.num_blocks} blocks of at most {tier.max_blocks}, read at "
        f"{tier.costs.bytes_per_s / 1e6:,.0f} MB/s; computing makes {kv_bytes_per_s / 1e6:,.0f} "
        "MB/s at the beginning of a prompt"
    )


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
