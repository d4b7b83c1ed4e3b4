"""`bench.fleet tiers`: the time to the first token of a prompt that was evicted, with a disk tier
and without one.

A model of the shape of SmolLM2-135M with random weights, on this machine's processor. Two engines
take turns, one with `kv_disk` and one without; each figure is the median of the turns' ratios:

    fresh    a prompt that was never asked: what the tier costs whom it cannot help
    again    one that was asked twice before, and evicted: read from disk
    slow     as `again`, on a disk that has just turned slow: what waiting for it in vain costs
    after    as `again`, once that disk is well and has answered what it was asked
    stalls   as `again`, on a disk of which one read in 100 takes a second longer
    outage   as `again`, one prompt of each length after the other on a disk that stays slow
    back     as `outage`, once that disk is well, until all lengths that `again` reads are read

An engine remembers what its disk did: what reads took, and which waits were in vain. That is part
of what is measured, and would be measured in the wrong place if a slow disk came before the figures
of one that is well. So all turns on a disk that is well come first; those of a disk that turns
slow have the one after it has recovered beside them, which shows what it leaves behind; and those
of one that is broken for longer come last.

The figures beside them are of the engine with the disk; on a busy machine the ratios hold better.
`late` counts the prompts that waited in vain. `--encrypted` does the same with
`kv_disk_encrypted`. Before all that, what sealing a block and undoing it takes, in processor time,
with a CRC and encrypted.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from bench.fleet.goals import FleetGoal, tell
from bench.tools.workload import SMOLLM2_135M, build_checkpoint
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineOutput, EngineRequest, SamplingParams, Usage
from engine.scheduling.prefix_loader import PrefixLoader
from engine.tiers.disk import DiskTier
from engine.tiers.encryption import KEY_BYTES, TierKey
from engine.tiers.segment_files import SegmentFile
from engine.tiers.segments import DIGEST_BYTES, ID_BYTES, LAYOUT_BYTES, SegmentFormat

LENGTHS = (64, 256, 1024, 2048)
CASES = ("fresh", "again", "slow", "after", "stalls", "outage", "back")
GOAL_LENGTH, GOAL, NEVER = 2048, 0.35, 1.05
SLOW_S = 2.0
"""The time that each read of a slow disk takes longer."""
STALL_S, STALLS_OF = 1.0, 100
OUTAGE_ROUNDS = 5
MAX_ROUNDS_BACK = 50
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

    @property
    def loader(self) -> PrefixLoader:
        loader = self.core._loader
        assert loader is not None
        return loader

    @property
    def disk(self) -> DiskTier:
        disk = self.loader.disk
        assert isinstance(disk, DiskTier)
        return disk

    def evict(self) -> None:
        """Empty the pool, once all is written that was to be."""
        while self.core.has_work():
            self.core.step()
        if self.core._loader is not None:
            while self.disk._pending:
                self.disk.signal.wait(1.0)
        cache = self.core._scheduler.cache
        while cache._idle:
            cache._evict()

    def settle(self) -> None:
        """Wait until the disk has answered all it was asked."""
        while self.disk._reads.qsize() or max(self.disk._began_s) != math.inf:
            self.disk.signal.wait(1.0)


class Found(NamedTuple):
    """Says what one prompt took."""

    ratio: float
    seconds: float
    """With the disk."""
    num_read: int
    is_late: bool


class Bench:
    """Asks two engines for the same, in turns."""

    def __init__(self, tiered: Asker, plain: Asker, seed: int) -> None:
        self._tiered, self._plain, self._seed = tiered, plain, seed
        self.found: defaultdict[tuple[int, str], list[Found]] = defaultdict(list)
        """By length and case."""
        self.back_s: defaultdict[int, list[float]] = defaultdict(list)
        """By length: from a disk's recovery until it was read."""

    def well(self, lengths: Sequence[int], turns: int) -> None:
        for length in lengths:
            for turn in range(turns):
                prompt = self._prompt(length, turn)
                self._ask("fresh", prompt)
                self._keep(prompt)
                self._ask("again", prompt)
                self._keep(prompt)

    def slow(self, lengths: Sequence[int], turns: int) -> None:
        for length in lengths:
            for turn in range(turns):
                prompt = self._prompt(length, turn)
                with reads_delayed(lambda: SLOW_S):
                    self._ask("slow", prompt)
                    self._tiered.settle()
                self._keep(prompt)
                self._ask("after", prompt)
                self._keep(prompt)

    def stalls(self, lengths: Sequence[int], turns: int) -> None:
        draw = random.Random(self._seed)
        with reads_delayed(lambda: 0.0 if draw.randrange(STALLS_OF) else STALL_S):
            for length in lengths:
                for turn in range(turns):
                    prompt = self._prompt(length, turn)
                    self._ask("stalls", prompt)
                    self._tiered.settle()
                    self._keep(prompt)

    def outage(self, lengths: Sequence[int]) -> None:
        with reads_delayed(lambda: SLOW_S):
            for _ in range(OUTAGE_ROUNDS):
                for length in lengths:
                    self._ask("outage", self._prompt(length, 0))
                    self._evict()
            self._tiered.settle()
        began = time.monotonic()
        waiting = [each for each in lengths if self.num_read(each, "again")]
        for _ in range(MAX_ROUNDS_BACK):
            for length in [*waiting]:
                asked_s = time.monotonic() - began
                if self._ask("back", self._prompt(length, 0)).num_read:
                    waiting.remove(length)
                    self.back_s[length].append(asked_s)
                self._evict()
            if not waiting:
                return

    def num_read(self, length: int, case: str) -> int:
        """Return the median of the turns."""
        return int(statistics.median(each.num_read for each in self.found[length, case]))

    def _prompt(self, length: int, turn: int) -> list[int]:
        rng = random.Random(f"{self._seed}:{turn}:{length}")
        return [rng.randrange(3, VOCAB) for _ in range(length)]

    def _ask(self, case: str, prompt: list[int]) -> Found:
        is_odd = len(self.found[len(prompt), case]) % 2
        both = (self._tiered, self._plain) if is_odd else (self._plain, self._tiered)
        num_late = self._tiered.loader.num_late
        took = {asker: asker.first_token(prompt) for asker in both}
        seconds, usage = took[self._tiered]
        found = Found(
            seconds / took[self._plain][0],
            seconds,
            usage.tier_tokens,
            self._tiered.loader.num_late > num_late,
        )
        self.found[len(prompt), case].append(found)
        return found

    def _keep(self, prompt: list[int]) -> None:
        """Have a prompt that was just asked be written, and evict it."""
        for asker in (self._tiered, self._plain):
            asker.first_token(prompt)
        self._evict()

    def _evict(self) -> None:
        for asker in (self._tiered, self._plain):
            asker.evict()


@contextmanager
def reads_delayed(delay_s: Callable[[], float]) -> Iterator[None]:
    """Have each read from disk take so much longer."""
    read_at = SegmentFile.read_at

    def read_slowly(segment: SegmentFile, memory: memoryview, offset: int) -> int:
        time.sleep(delay_s())
        return read_at(segment, memory, offset)

    with patch.object(SegmentFile, "read_at", read_slowly):
        yield


def lengths_of(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def main(command: str, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"bench.fleet {command}", description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--lengths", type=lengths_of, default=LENGTHS, help="64,256,1024,2048")
    parser.add_argument("--seed", type=int, default=0)
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
        print_sealing(tiered.disk._form.payload_bytes)
        print(f"disk: {tiered.disk.costs.bytes_per_s / 1e6:,.0f} MB/s measured at start")
        for asker in (tiered, plain):  # so that costs are learnt, and all code is loaded
            asker.first_token([3] * GOAL_LENGTH)
            asker.evict()
        bench = Bench(tiered, plain, asked.seed)
        bench.well(asked.lengths, asked.turns)
        bench.slow(asked.lengths, asked.turns)
        bench.stalls(asked.lengths, asked.turns)
        bench.outage(asked.lengths)
        tiered.core.close()
    return tell(report(bench, asked.lengths))


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


def report(bench: Bench, lengths: Sequence[int]) -> list[FleetGoal]:
    print(f"{'tokens':>7} {'case':>6} {'ratio':>7} {'most':>7} {'ms':>9} {'read':>6} {'late':>6}")
    worst, best = 0.0, 1.0
    for length in lengths:
        for case in CASES:
            found = bench.found.get((length, case))
            if not found:
                continue
            ratio = statistics.median(each.ratio for each in found)
            took_s = statistics.median(each.seconds for each in found)
            late = f"{sum(each.is_late for each in found)}/{len(found)}"
            most = max(each.ratio for each in found)
            print(
                f"{length:>7} {case:>6} {ratio:>7.3f} {most:>7.3f} {took_s * 1e3:>9.1f} "
                f"{bench.num_read(length, case):>6} {late:>6}"
            )
            worst = max(worst, ratio)
            if (length, case) == (GOAL_LENGTH, "again"):
                best = ratio
    for length, back_s in bench.back_s.items():
        print(f"{length} tokens were read {max(back_s):.1f} s after a slow disk was well")
    text = "with the disk over without, to the first token"
    goals = [
        FleetGoal(
            name="G8", text=f"the worst case, {text}", reached=worst, wanted=NEVER, at_most=True
        )
    ]
    if GOAL_LENGTH in lengths:
        goals.append(
            FleetGoal(
                name="G8",
                text=f"{GOAL_LENGTH} evicted tokens, {text}",
                reached=best,
                wanted=GOAL,
                at_most=True,
            )
        )
    return goals
