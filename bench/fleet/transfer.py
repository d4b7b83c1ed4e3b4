"""`bench.fleet transfer`: KV blocks of another engine on this machine, read and computed.

A model of the shape of SmolLM2-135M with random weights, on this machine's processor; two engines
in one process, of which one has computed what the other is asked for.

    speed    bytes a second out of the other's memory, beside a plain copy of as many, both of
             processor time, since one thread does all of it and other load is not to count; and
             over a socket, with checksums; the medians of the turns, in which all ways alternate
    prompt   the time to the first token of a prompt that is read, over that of one that is
             computed: the median of the turns, which alternate

The plain copy is of one piece of the memory that blocks are read from: a file of memory, which
Linux gives huge pages only where `shmem_enabled` allows it. Memory of huge pages is copied faster,
with fewer translations of addresses; that figure is printed beside it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.fleet.goals import FleetGoal, tell
from bench.tools.workload import SMOLLM2_135M, build_checkpoint
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineOutput, EngineRequest, KVSource, SamplingParams, Usage
from engine.sequence import Sequence as EngineSequence
from engine.transfer.connection import PeerConnection
from engine.transfer.messages import BlocksHeld
from engine.transfer.peers import READ_BYTES
from engine.transfer.serving import BlockServer

LENGTHS = (2048, 1024, 256, 128, 64, 32)
SPEED_LENGTH = 2048
VOCAB = 32_000
KV_CACHE_BYTES = 1 << 28
OF_A_COPY, SOCKET_BYTES_PER_S = 0.6, 1e9
SPEED_TURNS = 5
"""A turn of prompts takes as long as many of copies."""
HOLD_S = 60.0
MEMORY, SOCKET = "out of the other's memory", "over a socket, with checksums"
COPY, HUGE_COPY = "a plain copy of as much of that memory", "a plain copy of huge pages"


class Reader:
    """One of the two engines, which is asked a prompt at a time."""

    def __init__(self, folder: Path, dtype: str, socket: Path) -> None:
        self.core = EngineCore(
            EngineConfig(
                model=folder,
                device="cpu",
                dtype=dtype,  # type: ignore[arg-type]  # of the arguments, checked there
                kv_cache_bytes=KV_CACHE_BYTES,
                peer_listen=f"unix:{socket}",
            )
        )
        self._number = 0

    def first_token(self, prompt: list[int], fetch: KVSource | None = None) -> tuple[float, Usage]:
        """Return the seconds until the first token, and the usage."""
        self._number += 1
        request = EngineRequest(
            request_id=str(self._number),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            fetch=fetch,
        )
        began = time.perf_counter()
        self.core.add(request)
        outputs: list[EngineOutput] = []
        while not outputs:
            self.core.expire()
            outputs = self.core.step()
        return time.perf_counter() - began, outputs[0].usage

    def evict(self) -> None:
        self.core.expire()
        cache = self.core._scheduler.cache
        while cache._idle:
            cache._evict()

    def as_source(self, num_tokens: int) -> KVSource:
        status = self.core.status()
        assert status.peer is not None
        return KVSource(
            engine_id=status.engine_id, address=status.peer.address, num_tokens=num_tokens
        )

    def digests_of(self, prompt: list[int]) -> list[bytes]:
        seq = EngineSequence(
            request_id="",
            index=0,
            order=(0, 0),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=1),
            seed=0,
            cache_salt="",
        )
        return self.core._scheduler.cache.prompt_digests(seq)[1:]

    def connected(self, address: str) -> PeerConnection:
        status, resolved = self.core.status(), self.core.resolved
        assert status.peer is not None
        return PeerConnection(
            address,
            token="",
            layout=status.peer.layout,
            block_bytes=resolved.kv_bytes_per_token * resolved.block_size,
            timeout_s=30.0,
        )


def prompt_of(turn: int, length: int) -> list[int]:
    draw = random.Random(f"{turn}:{length}")
    return [draw.randrange(3, VOCAB) for _ in range(length)]


def read_s(
    clock: Callable[[], float], peer: PeerConnection, held: BlocksHeld, rows: NDArray[np.uint8]
) -> float:
    """Return the seconds to read all that is held, in parts as large as `rows`."""
    began = clock()
    for first in range(0, len(held.blocks), len(rows)):
        part = rows[: len(held.blocks) - first]
        assert peer.read(held, first, part) == len(part)
    return clock() - began


def copied_s(source: NDArray[np.uint8], into: NDArray[np.uint8]) -> float:
    """Return the processor seconds of a plain copy, in parts as large."""
    began = time.thread_time()
    for first in range(0, len(source), len(into)):
        part = source[first : first + len(into)]
        np.copyto(into[: len(part)], part)
    return time.thread_time() - began


def measure_speed(owner: Reader, reader: Reader, socket: Path, turns: int) -> list[FleetGoal]:
    prompt = prompt_of(-1, SPEED_LENGTH)
    owner.first_token(prompt)
    core, status = owner.core, owner.core.status()
    sharing = core._sharing
    assert status.peer is not None and sharing is not None
    assert sharing.pool is not None and sharing.holds is not None
    block_bytes = sharing.pool.shape.block_bytes
    sending = BlockServer(
        f"unix:{socket}",
        sharing.holds,
        sharing.pool,
        engine_id=core.engine_id,
        layout=status.peer.layout,
        block_bytes=block_bytes,
        num_blocks=core.resolved.num_blocks,
    )
    digests = owner.digests_of(prompt)
    num_bytes = len(digests) * block_bytes
    rows = np.zeros((max(1, READ_BYTES // block_bytes), block_bytes), np.uint8)
    with ExitStack() as peers:
        peers.callback(sending.close)

        def reading(address: str, clock: Callable[[], float]) -> Callable[[], float]:
            peer = reader.connected(address)
            peers.callback(peer.close)
            held = peer.hold(digests, 0, HOLD_S)
            assert held is not None and len(held.blocks) == len(digests)
            peers.callback(peer.release, held)
            return partial(read_s, clock, peer, held, rows)

        pool = np.frombuffer(sharing.pool._mapped, np.uint8)[:num_bytes]
        took = in_turns(
            turns * SPEED_TURNS,
            {
                MEMORY: reading(status.peer.address, time.thread_time),
                COPY: partial(copied_s, pool, rows.reshape(-1)),
                HUGE_COPY: partial(copied_s, np.ones(num_bytes, np.uint8), rows.reshape(-1)),
                SOCKET: reading(sending.address, time.perf_counter),
            },
        )
        del pool
    for name, seconds in took.items():
        print(f"{num_bytes / statistics.median(seconds) / 1e9:>7.2f} GB/s  {name}")
    print(f"{share_of(took[HUGE_COPY], took[MEMORY]):>7.3f} out of memory, over {HUGE_COPY}")
    return [
        FleetGoal(
            name="G7",
            text=f"out of memory, over {COPY}",
            reached=share_of(took[COPY], took[MEMORY]),
            wanted=OF_A_COPY,
        ),
        FleetGoal(
            name="G7",
            text="bytes a second over a socket",
            reached=num_bytes / statistics.median(took[SOCKET]),
            wanted=SOCKET_BYTES_PER_S,
        ),
    ]


def in_turns(turns: int, ways: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Return the seconds of each turn, without a first one, which maps pages."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + turns):
        for name, measure in ways.items():
            took[name].append(measure())
    return {name: seconds[1:] for name, seconds in took.items()}


def share_of(copied: Sequence[float], read: Sequence[float]) -> float:
    """Return the median of how much of the speed of a copy a read has in the same turn."""
    return statistics.median(one / other for one, other in zip(copied, read, strict=True))


def measure_prompts(owner: Reader, reader: Reader, turns: int) -> None:
    ratio_of(owner, reader, SPEED_LENGTH, turns)  # so that they know each other
    print(f"{'tokens':>7} {'ratio':>7} {'read ms':>9} {'computed ms':>12} {'read tokens':>12}")
    pays: list[int] = []
    for length in LENGTHS:
        found = [ratio_of(owner, reader, length, turn) for turn in range(turns)]
        ratio, read_s, computed_s, tokens = (
            statistics.median(each) for each in zip(*found, strict=True)
        )
        print(
            f"{length:>7} {ratio:>7.3f} {read_s * 1e3:>9.1f} {computed_s * 1e3:>12.1f} "
            f"{tokens:>12.0f}"
        )
        pays += [length] if ratio < 1 and tokens else []
    print(f"reading pays from {min(pays, default=0)} tokens on (0: never)")


def ratio_of(owner: Reader, reader: Reader, length: int, turn: int) -> Sequence[float]:
    """Return the seconds read over those computed, both, and the tokens that were read."""
    prompt = prompt_of(turn, length)
    owner.first_token(prompt)
    seconds, read = {}, 0
    for is_read in (True, False) if turn % 2 else (False, True):
        fetch = owner.as_source(length) if is_read else None
        seconds[is_read], usage = reader.first_token(prompt, fetch)
        read += usage.fetched_tokens
        reader.evict()
    owner.evict()
    return seconds[True] / seconds[False], seconds[True], seconds[False], read


def main(command: str, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"bench.fleet {command}", description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        build_checkpoint(folder, SMOLLM2_135M | {"max_position_embeddings": 4096}, asked.dtype)
        owner, reader = (
            Reader(folder, asked.dtype, Path(scratch) / f"kv-{number}.sock") for number in (0, 1)
        )
        for each in (owner, reader):  # so that costs are learnt, and all code is loaded
            each.first_token([3] * SPEED_LENGTH)
            each.evict()
        goals = measure_speed(owner, reader, Path(scratch) / "sent.sock", asked.turns)
        measure_prompts(owner, reader, asked.turns)
        for each in (owner, reader):
            each.core.close()
    return tell(goals)
