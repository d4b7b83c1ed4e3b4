"""Engines that read each other's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.errors import ConfigError
from engine.protocol import EngineRequest, KVSource, SamplingParams, Usage
from engine.runner.memory.kv_blocks import KVBlockCopier
from engine.tiers.policy import PrefillCosts
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
        if core._loader is not None:  # what a toy would compute sooner, too
            core._loader._costs = lambda: PrefillCosts(token_s=1.0)
        cores.append(core)
        return core

    yield starts
    for core in cores:
        core.close()


def run(
    core: EngineCore,
    request_id: str,
    prompt: Sequence[int],
    fetch: KVSource | None = None,
    salt: str = "",
) -> tuple[list[int], Usage]:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    asked = EngineRequest(
        request_id=request_id,
        prompt_token_ids=[*prompt],
        sampling=sampling,
        fetch=fetch,
        cache_salt=salt,
    )
    return finish(core, asked)


def finish(core: EngineCore, asked: EngineRequest) -> tuple[list[int], Usage]:
    core.add(asked)
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


@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_dtype": "fp8"}, {"dtype": "bfloat16"}, {"deterministic": True}]
)
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
    assert status.num_held_blocks == NUM_BLOCKS // 8
    core.check_integrity()
    peer.close()


def source_of(core: EngineCore, num_tokens: int = len(LONG)) -> KVSource:
    peer = core.status().peer
    assert peer is not None
    return KVSource(engine_id=core.engine_id, address=peer.address, num_tokens=num_tokens)


def test_a_prefix_is_read_from_the_engine_that_has_it(start: Starts) -> None:
    owner, reader = start(), start()
    text, _ = run(owner, "first", LONG)
    again, usage = run(reader, "second", LONG, source_of(owner))
    assert again == text
    assert usage.cached_tokens == usage.fetched_tokens == 192 and usage.tier_tokens == 0
    status = reader.status()
    assert status.fetched_tokens == status.prefix_cache_hit_tokens == 192
    assert status.fetched_bytes == 12 * 16 * reader.resolved.kv_bytes_per_token
    _, usage = run(reader, "third", LONG, source_of(owner))
    assert usage.cached_tokens == 192 and usage.fetched_tokens == 0, "it has them itself by now"


def test_the_rest_is_read_behind_what_is_cached(start: Starts) -> None:
    owner, reader = start(), start()
    run(owner, "first", LONG)
    run(reader, "begun", LONG[:70])
    text, usage = run(reader, "second", [*LONG, 5, 6], source_of(owner))
    assert usage.cached_tokens == 192 and usage.fetched_tokens == 192 - 64
    assert text == run(owner, "third", [*LONG, 5, 6])[0]


def test_nobody_reads_what_is_another_salts(start: Starts) -> None:
    owner, reader = start(), start()
    run(owner, "first", LONG, salt="a")
    assert run(reader, "theirs", LONG, source_of(owner), "b")[1].cached_tokens == 0
    assert run(reader, "ours", LONG, source_of(owner), "a")[1].fetched_tokens == 192


def test_an_engine_of_another_layout_is_not_read(start: Starts) -> None:
    owner, reader = start(dtype="bfloat16"), start()
    run(owner, "first", LONG)
    text, usage = run(reader, "second", LONG, source_of(owner))
    assert usage.cached_tokens == 0 and reader.status().num_failed_fetches == 1
    assert text == run(start(peer_listen=None), "second", LONG)[0]


def test_what_the_owner_lost_is_computed(start: Starts) -> None:
    owner, reader = start(num_blocks=16), start()
    text, _ = run(owner, "first", LONG)
    source = source_of(owner)
    run(owner, "filler", [4 + (11 * i) % 90 for i in range(250)])
    again, usage = run(reader, "second", LONG, source)
    assert again == text and usage.fetched_tokens == 0
    owner.close()
    owner.close = lambda: None  # type: ignore[method-assign]
    again, usage = run(reader, "third", [7, *LONG], source)
    assert usage.fetched_tokens == 0


def test_what_an_owner_hides_is_waited_for_no_longer_than_it_is_worth(start: Starts) -> None:
    """The other engine takes the connection and says nothing."""
    owner, reader = start(), start()
    text, _ = run(owner, "first", LONG)
    assert owner._sharing is not None and owner._sharing._server is not None
    assert reader._loader is not None
    reader._loader._costs = lambda: PrefillCosts(token_s=0.01)
    with owner._sharing._server._lock:  # whoever connects waits for it
        again, usage = run(reader, "second", LONG, source_of(owner))
    assert again == text and usage.fetched_tokens == 0
    assert reader._loader.num_late == 1


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
    (tmp_path / "shown").write_text("secret\n")
    with pytest.raises(ConfigError, match="open to other machines, .* in the clear; say --insec"):
        start(peer_listen="tcp:0.0.0.0:0", peer_token_file=tmp_path / "shown")
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_computes_a_prompt_and_another_goes_on(start: Starts, temperature: float) -> None:
    """With the first token of the one, and its KV but for the last block's, as if it were alone."""
    sampling = SamplingParams(max_tokens=6, temperature=temperature, ignore_eos=True, seed=7)
    asked = EngineRequest(request_id="a", prompt_token_ids=LONG, sampling=sampling)
    alone, _ = finish(start(), asked)
    source, reader = start(), start()
    first = msgspec.structs.replace(sampling, max_tokens=1)
    said, _ = finish(source, msgspec.structs.replace(asked, sampling=first))
    assert said == alone[:1]
    peer = source.status().peer
    assert peer is not None
    fetch = KVSource(engine_id=source.engine_id, address=peer.address, num_tokens=len(LONG) - 1)
    rest, usage = finish(reader, msgspec.structs.replace(asked, said=(said,), fetch=fetch))
    assert said + rest == alone
    assert usage.fetched_tokens == (len(LONG) - 1) // 16 * 16
    assert usage.resumed_tokens == 1
