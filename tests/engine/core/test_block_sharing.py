"""Engines that read each other's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError
from engine.protocol import EngineRequest, SamplingParams, Usage
from engine.runner.memory.kv_blocks import KVBlockCopier
from engine.transfer.connection import PeerConnection
from tests.engine import checkpoints
from tests.engine.transfer.owner import sequence

Starts = Callable[..., EngineCore]
LONG = [3 + (7 * i) % 90 for i in range(200)]
NUM_BLOCKS = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save("llama3", tmp_path_factory.mktemp("shared"))


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[Starts]:
    torch.set_num_threads(1)
    cores: list[EngineCore] = []

    def starts(**changes: Any) -> EngineCore:
        options: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "dtype": "float32"}
        options |= {"poison_freed_blocks": True, "max_model_len": 256}
        options |= {"peer_listen": f"unix:{tmp_path}/kv-{len(cores)}.sock"}
        core = EngineCore(EngineConfig(model=folder, **(options | changes)))
        cores.append(core)
        return core

    yield starts
    for core in cores:
        core.close()


def run(core: EngineCore, request_id: str, prompt: Sequence[int]) -> tuple[list[int], Usage]:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    core.add(EngineRequest(request_id=request_id, prompt_token_ids=[*prompt], sampling=sampling))
    outputs = []
    while core.has_work():
        outputs += core.step()
        core.check_integrity()
    return [token for each in outputs for token in each.token_ids], outputs[-1].usage


def connected(core: EngineCore, layout: bytes | None = None) -> PeerConnection:
    peer = core.status().peer
    assert peer is not None
    return PeerConnection(
        peer.address,
        token="",
        layout=peer.layout if layout is None else layout,
        block_bytes=core.resolved.kv_bytes_per_token * core.resolved.block_size,
        timeout_s=30.0,
    )


def digests_of(core: EngineCore, prompt: Sequence[int]) -> list[bytes]:
    return core._scheduler.cache.prompt_digests(sequence(prompt))[1:]


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}])
def test_blocks_are_read_as_they_are_in_the_pool(start: Starts, options: dict[str, Any]) -> None:
    core = start(**options)
    text, _ = run(core, "first", LONG)
    assert text == run(start(peer_listen=None, **options), "first", LONG)[0]
    peer = connected(core)
    assert peer.via == "memory" and peer.engine_id == core.engine_id
    held = peer.hold(digests_of(core, LONG), 0, 30.0)
    assert held is not None and len(held.blocks) == 12
    rows = np.zeros((12, core.resolved.kv_bytes_per_token * 16), np.uint8)
    assert peer.read(held, 0, rows) == 12
    runner: Any = core._stepper._runner
    own = np.zeros_like(rows)
    KVBlockCopier(runner._cache).gather(held.blocks, own)()
    assert np.array_equal(rows, own) and rows.any()
    core.expire()
    status = core.status()
    assert status.peer is not None and status.peer.num_held_blocks == NUM_BLOCKS // 8
    core.check_integrity()
    peer.close()


def test_what_is_held_never_keeps_the_longest_sequence_from_running(start: Starts) -> None:
    core = start(num_blocks=16)
    run(core, "first", LONG)
    peer = connected(core)
    assert peer.hold(digests_of(core, LONG), 0, 30.0) is not None
    core.expire()
    _, usage = run(core, "longest", [4 + (11 * i) % 90 for i in range(250)])
    assert usage.generated_tokens == 6
    peer.close()


def test_engines_with_other_kv_have_another_layout(start: Starts) -> None:
    one, same, other = start(), start(), start(kv_cache_dtype="fp8")
    layouts = [core.status().peer for core in (one, same, other)]
    assert all(each is not None for each in layouts)
    first, second, third = (each.layout for each in layouts if each is not None)
    assert first == second != third


def test_what_is_wrong_is_told_before_anything_is_loaded(start: Starts, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has to show a token"):
        start(peer_listen="tcp:127.0.0.1:0")
    with pytest.raises(ConfigError, match="expected unix:/path"):
        start(peer_listen="nowhere")
    with pytest.raises(ConfigError, match="without prefix_caching"):
        start(prefix_caching=False)
    with pytest.raises(ConfigError, match="No such file"):
        start(peer_token_file=tmp_path / "none")
    empty = tmp_path / "token"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        start(peer_token_file=empty)


def test_over_tcp_blocks_are_sent_to_who_shows_the_token(start: Starts, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    core = start(peer_listen="tcp:127.0.0.1:0", peer_token_file=file)
    run(core, "first", LONG)
    status = core.status().peer
    assert status is not None
    with pytest.raises(Exception, match="the token is another one"):
        connected(core)
    peer = PeerConnection(
        status.address,
        token="secret",
        layout=status.layout,
        block_bytes=core.resolved.kv_bytes_per_token * 16,
        timeout_s=30.0,
    )
    held = peer.hold(digests_of(core, LONG), 0, 30.0)
    assert held is not None and peer.via == "socket"
    rows = np.zeros((12, core.resolved.kv_bytes_per_token * 16), np.uint8)
    assert peer.read(held, 0, rows) == 12
    peer.close()
