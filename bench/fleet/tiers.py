"""`bench.fleet tiers`: the time to the first token of a prompt that was evicted, with a disk tier
and without one.

A model of the shape of SmolLM2-135M with random weights, on this machine's processor. Two engines
take turns, one with `kv_disk` and one without; each figure is the median of the turns' ratios:

    again    a prompt that was asked twice before, and evicted: read from disk
    fresh    one that was never asked: what the tier costs whom it cannot help
    slow     as `again`, with a disk that turned slow: what waiting for it in vain costs

The figures beside them are of the engine with the disk; on a busy machine the ratios hold better.
`--encrypted` does the same with `kv_disk_encrypted`. Before all that, what sealing a block and
undoing it takes, in processor time, with a CRC and encrypted.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

from bench.fleet.goals import FleetGoal, tell
from bench.tools.workload import SMOLLM2_135M, build_checkpoint
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineOutput, EngineRequest, SamplingParams, Usage
from engine.tiers.disk import DiskTier
from engine.tiers.encryption import KEY_BYTES, TierKey
from engine.tiers.segment_files import SegmentFile
from engine.tiers.segments import DIGEST_BYTES, ID_BYTES, LAYOUT_BYTES, SegmentFormat

LENGTHS = (64, 256, 1024, 2048)
GOAL_LENGTH, GOAL, NEVER = 2048, 0.35, 1.05
SLOW_S = 2.0
"""The time that each read of a slow disk takes longer."""
VOCAB = 32_000
KV_CACHE_BYTES = 1 << 28
SEALED_BLOCKS = 500


class Asker:
    """Asks one engine, a prompt at a time."""

    def __init__(
        self, folder: Path, dtype: str, disk: Path | None, key_file: Path | None = None
    ) -> None:
        config = EngineConfig(
            model=folder,
            device="cpu",
            dtype=dtype,  # type: ignore[arg-type]  # of the arguments, checked there
            kv_cache_bytes=KV_CACHE_BYTES,
            kv_disk=disk,
            kv_disk_encrypted=key_file is not None,
            kv_key_file=key_file,
        )
        self.core = EngineCore(config)
        self._number = 0

    def first_token(self, prompt: list[int]) -> tuple[float, Usage]:
        """Return the seconds until the first token, and the usage."""
        self._number += 1
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        name = str(self._number)
        began = time.perf_counter()
        self.core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
        outputs: list[EngineOutput] = []
        while not outputs:
            outputs = self.core.step()
        return time.perf_counter() - began, outputs[0].usage

    def evict(self) -> None:
        """Empty the pool, once all is written that was to be."""
        while self.core.has_work():
            self.core.step()
        if (loader := self.core._loader) is not None:
            assert isinstance(loader.disk, DiskTier)
            while loader.disk._pending:
                loader.signal.wait(1.0)
        cache = self.core._scheduler.cache
        while cache._idle:
            cache._evict()


@contextmanager
def slow_reads() -> Iterator[None]:
    read_at = SegmentFile.read_at

    def read_slowly(segment: SegmentFile, memory: memoryview, offset: int) -> int:
        time.sleep(SLOW_S)
        return read_at(segment, memory, offset)

    with patch.object(SegmentFile, "read_at", read_slowly):
        yield


def ratios(tiered: Asker, plain: Asker, length: int, turn: int) -> dict[str, tuple[float, float]]:
    """Return of each case what it took with the disk, over what it took without, and the seconds of
    the first."""
    rng = random.Random(f"{turn}:{length}")
    prompt = [rng.randrange(3, VOCAB) for _ in range(length)]
    found: dict[str, tuple[float, float]] = {}
    for case in ("fresh", "again", "slow"):
        seconds: dict[Asker, float] = {}
        for asker in (tiered, plain) if turn % 2 else (plain, tiered):
            with slow_reads() if case == "slow" and asker is tiered else nullcontext():
                seconds[asker], usage = asker.first_token(prompt)
            if case == "again" and asker is tiered:
                found["read"] = float(usage.tier_tokens), seconds[asker]
        found[case] = seconds[tiered] / seconds[plain], seconds[tiered]
        if case == "slow":
            time.sleep(SLOW_S)  # its last reads end
        for asker in (tiered, plain):
            asker.first_token(prompt)  # so that it is worth keeping
            asker.evict()
    return found


def main(command: str, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"bench.fleet {command}", description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--encrypted", action="store_true")
    parser.add_argument("--disk", type=Path, help="a folder on the disk to measure; unset: /tmp")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=asked.disk) as scratch:
        folder, disk = Path(scratch) / "model", Path(scratch) / "kv"
        build_checkpoint(folder, SMOLLM2_135M | {"max_position_embeddings": 4096}, asked.dtype)
        key_file = Path(scratch) / "key" if asked.encrypted else None
        if key_file is not None:
            key_file.write_bytes(os.urandom(KEY_BYTES))
        tiered, plain = Asker(folder, asked.dtype, disk, key_file), Asker(folder, asked.dtype, None)
        loader = tiered.core._loader
        assert loader is not None and loader.disk is not None
        assert isinstance(loader.disk, DiskTier)
        print_sealing(loader.disk._form.payload_bytes)
        print(f"disk: {loader.disk.costs.bytes_per_s / 1e6:,.0f} MB/s measured at start")
        for asker in (tiered, plain):  # so that costs are learnt, and all code is loaded
            asker.first_token([3] * GOAL_LENGTH)
            asker.evict()
        goals = measure(tiered, plain, asked.turns)
        tiered.core.close()
    return tell(goals)


def print_sealing(payload_bytes: int) -> None:
    layout, digest = os.urandom(LAYOUT_BYTES), os.urandom(DIGEST_BYTES)
    for name, key in (("CRC", None), ("AES-256-GCM", TierKey(os.urandom(KEY_BYTES)))):
        form = SegmentFormat(layout, payload_bytes, key)
        cipher = form.cipher_of(os.urandom(ID_BYTES))
        record = memoryview(bytearray(form.record_bytes))
        seal_s = unseal_s = 0.0
        for slot in range(SEALED_BLOCKS):
            began = time.process_time()
            form.seal(record, digest, slot, cipher)
            sealed = time.process_time()
            assert form.unseal(record, slot, cipher) == digest
            seal_s, unseal_s = seal_s + sealed - began, unseal_s + time.process_time() - sealed
        took = " and ".join(f"{each / SEALED_BLOCKS * 1e6:.0f}" for each in (seal_s, unseal_s))
        print(f"{name}: {took} us to seal a block of {payload_bytes:,} bytes and to undo it")


def measure(tiered: Asker, plain: Asker, turns: int) -> list[FleetGoal]:
    print(f"{'tokens':>7} {'case':>6} {'ratio':>7} {'ms':>9} {'read':>6}")
    worst, best = 0.0, 1.0
    for length in LENGTHS:
        found = [ratios(tiered, plain, length, turn) for turn in range(turns)]
        num_read = int(statistics.median(each["read"][0] for each in found))
        for case in ("again", "fresh", "slow"):
            ratio = statistics.median(each[case][0] for each in found)
            took_s = statistics.median(each[case][1] for each in found)
            read = str(num_read) if case == "again" else ""
            print(f"{length:>7} {case:>6} {ratio:>7.3f} {took_s * 1e3:>9.1f} {read:>6}")
            worst = max(worst, ratio)
            if (length, case) == (GOAL_LENGTH, "again"):
                best = ratio
    text = "with the disk over without, to the first token"
    return [
        FleetGoal(
            name="G8",
            text=f"{GOAL_LENGTH} evicted tokens, {text}",
            reached=best,
            wanted=GOAL,
            at_most=True,
        ),
        FleetGoal(
            name="G8", text=f"the worst case, {text}", reached=worst, wanted=NEVER, at_most=True
        ),
    ]
