"""The engine with tiers: what was evicted is read back, and says what it said before."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.kv_layout import HASHES, layout_digest
from engine.errors import ConfigError
from engine.protocol import EngineRequest, SamplingParams, Usage
from engine.tiers.disk import DiskTier
from engine.tiers.host import HostTier
from engine.tiers.policy import PrefillCosts, ReadCosts
from tests.engine import checkpoints

Starts = Callable[..., EngineCore]
LONG = [3 + (7 * i) % 90 for i in range(200)]
NUM_BLOCKS = 16
"""The longest sequence takes all of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save("llama3", tmp_path_factory.mktemp("tiered"))


@pytest.fixture
def start(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    torch.set_num_threads(1)
    monkeypatch.setattr("engine.tiers.segment_files.PROBE_BYTES", 1)
    cores: list[EngineCore] = []

    def starts(is_worth: bool = True, **changes: Any) -> EngineCore:
        options: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "dtype": "float32"}
        options |= {"poison_freed_blocks": True, "kv_disk": tmp_path / "kv", "max_model_len": 256}
        core = EngineCore(EngineConfig(model=folder, **(options | changes)))
        if is_worth and core._loader is not None:  # what a toy would compute sooner, too
            core._loader._costs = lambda: PrefillCosts(token_s=1.0)
        cores.append(core)
        return core

    yield starts
    for core in cores:
        core.close()


def run(
    core: EngineCore, request_id: str, prompt: Sequence[int], salt: str = ""
) -> tuple[list[int], Usage]:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    core.add(
        EngineRequest(
            request_id=request_id, prompt_token_ids=[*prompt], sampling=sampling, cache_salt=salt
        )
    )
    outputs = []
    while core.has_work():
        outputs += core.step()
        core.check_integrity()
    assert core.status().num_free_blocks == core.resolved.num_blocks
    return [token for each in outputs for token in each.token_ids], outputs[-1].usage


def evict(core: EngineCore, salt: str = "") -> None:
    run(core, "filler", [4 + (11 * i) % 90 for i in range(245)], salt)


def disk_of(core: EngineCore) -> DiskTier:
    assert core._loader is not None and isinstance(core._loader.disk, DiskTier)
    return core._loader.disk


@contextmanager
def stalled(core: EngineCore) -> Iterator[None]:
    """Let no read end meanwhile: all buffers are taken."""
    buffers = disk_of(core)._read_buffers
    taken = list(iter(buffers.take, None))
    yield
    for buffer in taken:
        assert buffer is not None
        buffers.give_back(buffer)


def settle(core: EngineCore) -> None:
    """Wait until all is on disk that was to be written."""
    disk = disk_of(core)
    while disk._pending:
        disk.signal.wait(1.0)


def test_what_was_evicted_is_read_back(start: Starts) -> None:
    core = start()
    text, usage = run(core, "first", LONG)
    assert usage.cached_tokens == usage.tier_tokens == 0
    again, usage = run(core, "second", LONG)
    assert again == text and usage.cached_tokens == 192 and usage.tier_tokens == 0
    settle(core)
    evict(core)
    loaded, usage = run(core, "third", [*LONG, 5, 6])
    assert usage.cached_tokens == usage.tier_tokens == 192
    plain = start(kv_disk=None)
    assert loaded == run(plain, "third", [*LONG, 5, 6])[0]
    assert run(plain, "first", LONG)[0] == text


def test_what_was_computed_twice_is_read_by_the_next_process(start: Starts) -> None:
    core = start()
    text, _ = run(core, "first", LONG)
    evict(core)
    assert not disk_of(core).num_blocks, "used once"
    _, usage = run(core, "second", LONG)
    assert usage.tier_tokens == 0 and usage.seen is not None
    core.close()
    after = start()
    again, usage = run(after, "first", LONG)
    assert again == text and usage.cached_tokens == usage.tier_tokens == 192


def test_an_encrypted_disk_is_read_under_its_key(start: Starts, tmp_path: Path) -> None:
    keys = [tmp_path / "mine", tmp_path / "theirs"]
    for number, path in enumerate(keys):
        path.write_bytes(bytes([number]) * 32)
    core = start(kv_disk_encrypted=True, kv_key_file=keys[0])
    text, _ = run(core, "first", LONG)
    run(core, "second", LONG)
    settle(core)
    evict(core)
    again, usage = run(core, "third", LONG)
    assert again == text and usage.tier_tokens == 192
    core.close()
    for key_file, tier_tokens in ((keys[1], 0), (keys[0], 192)):
        after = start(kv_disk_encrypted=True, kv_key_file=key_file)
        again, usage = run(after, "first", LONG)
        assert again == text and usage.tier_tokens == tier_tokens
        after.close()


def test_nobody_reads_what_another_salt_wrote(start: Starts) -> None:
    core = start()
    for request_id in ("first", "second"):
        run(core, request_id, LONG, salt="a")
    settle(core)
    evict(core)
    assert run(core, "theirs", LONG, salt="b")[1].cached_tokens == 0
    evict(core)
    assert run(core, "mine", LONG, salt="a")[1].tier_tokens == 192


def test_a_damaged_block_is_computed(start: Starts, caplog: pytest.LogCaptureFixture) -> None:
    core = start()
    text, _ = run(core, "first", LONG)
    run(core, "second", LONG)
    settle(core)
    [path] = disk_of(core).folder.glob("*.kv")
    with path.open("r+b") as file:
        file.seek(disk_of(core)._form.offset_of(5) + 1000)
        file.write(bytes(100))
    evict(core)
    with caplog.at_level(logging.WARNING):
        again, usage = run(core, "third", LONG)
    assert again == text and usage.tier_tokens == 5 * 16
    assert "damaged" in caplog.text


def test_a_disk_that_is_late_costs_little(start: Starts) -> None:
    core = start()
    run(core, "first", LONG)
    text, _ = run(core, "second", LONG)
    assert (loader := core._loader) is not None
    settle(core)
    evict(core)
    now = iter(range(0, 10_000, 11))  # 192 tokens take 192 s, of which 6 are to be had
    loader._clock = lambda: next(now)
    with stalled(core):
        again, usage = run(core, "third", LONG)
    assert again == text and usage.tier_tokens == 0 and loader.num_late == 1


def test_what_is_computed_sooner_is_not_read(start: Starts) -> None:
    core = start(is_worth=False)
    assert (loader := core._loader) is not None and loader._costs().token_s > 0
    loader._costs = lambda: PrefillCosts(token_s=1e-9)
    for request_id in ("first", "second"):
        run(core, request_id, LONG)
    settle(core)
    evict(core)
    assert run(core, "third", LONG)[1].cached_tokens == 0


def test_a_request_that_is_aborted_while_it_loads_leaves_nothing(start: Starts) -> None:
    core = start()
    for request_id in ("first", "second"):
        run(core, request_id, LONG)
    settle(core)
    evict(core)
    sampling = SamplingParams(max_tokens=6, temperature=0.0)
    assert (loader := core._loader) is not None
    with stalled(core):
        for request_id in ("third", "fourth"):
            asked = EngineRequest(request_id=request_id, prompt_token_ids=LONG, sampling=sampling)
            core.add(asked)
        core.step()
        core.check_integrity()
        assert len(loader._loads) == len(loader._following) == 1
        assert core.abort("third")[0].finish_reason == "abort"
        core.check_integrity()
    outputs = []
    while core.has_work():
        outputs += core.step()
        core.check_integrity()
    assert {each.request_id for each in outputs} == {"fourth"}
    assert outputs[-1].usage.tier_tokens == 192, "it followed, and read for itself"


def test_what_cannot_have_a_tier_says_so(start: Starts, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_disk is set, but no prefix is cached"):
        start(prefix_caching=False)
    with pytest.raises(ConfigError, match="kv_host_bytes is set, .*: raise kv_cache_bytes instead"):
        start(kv_host_bytes=1 << 30)
    with pytest.raises(ConfigError, match="kv_disk_encrypted is set, but kv_disk is not"):
        start(kv_disk=None, kv_disk_encrypted=True)
    with pytest.raises(ConfigError, match="kv_disk_encrypted is set, but kv_key_file is not"):
        start(kv_disk_encrypted=True)
    with pytest.raises(ConfigError, match="kv_disk_bytes is 8192: a sequence of 16 blocks takes"):
        start(kv_disk_bytes=8192)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_disk .*: Not a directory"):
        start(kv_disk=tmp_path / "file" / "kv")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_at_the_start_is_off_with_one_line(
    start: Starts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*arguments: object, **also: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("engine.core.kv_tiers.tempfile.TemporaryFile", fail)
    monkeypatch.setattr("engine.tiers.segment_files.SegmentFolder.write", fail)
    core = start()
    [record] = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "kv_disk" in record.message and os.strerror(number) in record.message
    assert run(core, "first", LONG)[1].tier_tokens == 0
    assert core.status().max_tier_blocks == 0


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pool pass for one that is not in host memory."""
    monkeypatch.setattr("engine.core.engine_core.check_tiers", lambda config, device: None)


@pytest.mark.usefixtures("on_device")
def test_what_the_pool_evicts_is_read_back_from_host_memory(start: Starts) -> None:
    core = start(kv_disk=None, kv_host_bytes=1 << 20)
    text, _ = run(core, "first", LONG)
    evict(core)
    again, usage = run(core, "second", LONG)
    assert again == text and usage.cached_tokens == usage.tier_tokens == 192, "it was used once"
    status = core.status()
    assert status.host_hit_tokens == 192 and status.tier_hit_tokens == 0
    assert 12 <= status.num_host_blocks <= status.max_host_blocks and not status.max_tier_blocks
    evict(core)
    assert run(core, "theirs", LONG, salt="b")[1].cached_tokens == 0


@pytest.mark.usefixtures("on_device")
def test_a_prefix_goes_on_from_host_memory_to_the_disk(start: Starts) -> None:
    core = start(kv_host_bytes=1 << 20)
    text, _ = run(core, "first", LONG)
    run(core, "second", LONG)
    settle(core)
    evict(core)
    assert (loader := core._loader) is not None and isinstance(loader.host, HostTier)
    host = loader.host
    host.costs = ReadCosts(0.0, 1e12)  # as measured the disk may be quicker
    digests = [digest for digest in host._place_of if disk_of(core).has(digest)]
    assert len(digests) >= 12
    for digest in digests[:5]:  # the pool's end is evicted first
        chunk, row = host._place_of.pop(digest)
        chunk.digests[row] = b""
    again, usage = run(core, "third", LONG)
    assert again == text and usage.cached_tokens == usage.tier_tokens == 192
    assert loader.hit_tokens["host"] == 7 * 16 and loader.hit_tokens["disk"] == 5 * 16


@pytest.mark.usefixtures("on_device")
def test_host_memory_for_no_sequence_is_refused(start: Starts) -> None:
    with pytest.raises(ConfigError, match="kv_host_bytes is 4096: a sequence of 16 blocks takes"):
        start(kv_disk=None, kv_host_bytes=4096)


def test_an_engine_beside_another_has_a_folder_of_its_own(start: Starts) -> None:
    cores = [start(), start()]
    folders = [disk_of(core).folder for core in cores]
    assert len({*folders}) == 2 and len({folder.parent for folder in folders}) == 1


def test_a_layout_names_the_weights_and_the_options(start: Starts, tmp_path: Path) -> None:
    resolved = start(kv_disk=None).resolved
    hashes = tmp_path / HASHES
    mine = layout_digest(resolved, 100, hashes)
    assert hashes.exists() and layout_digest(resolved, 100, hashes) == mine
    hashes.write_text("{")
    assert layout_digest(resolved, 100, hashes) == mine
    assert layout_digest(resolved, 101, hashes) != mine
    config = resolved.config.model / "config.json"
    config.write_bytes(config.read_bytes() + b"\n")
    assert layout_digest(resolved, 100, hashes) != mine
