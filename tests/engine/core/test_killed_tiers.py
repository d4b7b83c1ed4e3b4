"""An engine that is killed while it writes to its disk tier: whatever it left, the next one says
what an engine without a tier says.

The engines are processes of their own, forked from one that has torch loaded. Each is killed in the
middle of a write, of which a part reaches the file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.protocol import EngineRequest, SamplingParams, Usage
from engine.tiers.buffers import PAGE_BYTES
from engine.tiers.disk import DiskTier
from engine.tiers.policy import PrefillCosts
from engine.tiers.segment_files import SegmentFile, SegmentFolder
from engine.transport.client import EngineClient
from tests.budget import NIGHT, cycles
from tests.engine import checkpoints
from tests.engine.peers import collect

ROOT = Path(__file__).resolve().parents[3]
NUM_KILLS = cycles(400, 20)
NUM_PROMPTS, PROMPT_TOKENS, NUM_BLOCKS = 5, 120, 16
"""Two prompts take all blocks: what is asked again was evicted."""
NUM_ASKED, MAX_WRITES = 60, 12
"""So many prompts, half of them asked twice in a row, lead to more writes than that: of headers,
records and footers."""
DISK_BYTES = 1 << 19
"""Room for three of the prompts: segments are filled and freed all the time."""
EXIT_S = 60.0


def prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, checkpoints.VOCAB) for _ in range(PROMPT_TOKENS)]


def options(model: Path, disk: Path | None, key_file: Path | None) -> dict[str, Any]:
    return {
        "model": model,
        "device": "cpu",
        "dtype": "float32",
        "num_blocks": NUM_BLOCKS,
        "num_threads": 1,
        "max_model_len": 200,
        "kv_disk": disk,
        "kv_disk_bytes": DISK_BYTES,
        "kv_disk_encrypted": key_file is not None,
        "kv_key_file": key_file,
    }


def answer(core: EngineCore, number: int) -> tuple[list[int], Usage]:
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    core.add(EngineRequest(request_id="asked", prompt_token_ids=prompt(number), sampling=sampling))
    outputs = []
    while core.has_work():
        outputs += core.step()
    core.check_integrity()
    return [token for each in outputs for token in each.token_ids], outputs[-1].usage


class Killed(NamedTuple):
    """When an engine is killed: in this one of its writes, of which it does so many pages."""

    write: int
    pages: int
    order: list[int]
    """The prompts that it is asked, in turn."""


def live(asked: dict[str, Any], killed: Killed, parent: Connection) -> None:
    """Run an engine until it is killed, and tell the parent what it found and says."""
    write, num_writes = SegmentFolder.write, 0

    def write_or_die(
        folder: SegmentFolder, segment: SegmentFile, memory: memoryview, offset: int
    ) -> None:
        nonlocal num_writes
        num_writes += segment.path.suffix == ".kv"
        if num_writes == killed.write:
            part = memory[: min(killed.pages * PAGE_BYTES, len(memory))]
            os.pwrite(segment.fd, part, offset)
            os.kill(os.getpid(), signal.SIGKILL)
        write(folder, segment, memory, offset)

    SegmentFolder.write = write_or_die  # type: ignore[method-assign]
    core = EngineCore(EngineConfig(**asked))
    assert (loader := core._loader) is not None and isinstance(loader.disk, DiskTier)
    loader._costs = lambda: PrefillCosts(token_s=1.0)  # a toy would compute all of it sooner
    parent.send(("found", len(loader.disk._store), num_broken(loader.disk)))
    for number in killed.order:
        text, usage = answer(core, number)
        parent.send(("said", number, text, usage.tier_tokens))
    core.close()
    parent.send(("closed", num_writes))


def num_broken(tier: DiskTier) -> int:
    """Return how many of the records that a tier found are not what its index says."""
    form, broken = tier._form, 0
    memory = tier._read_buffers.take()
    assert memory is not None
    record = memory.memory[: form.record_bytes]
    for segment in tier._store._segments.values():
        for slot, digest in enumerate(segment.digests):
            num_read = segment.read_at(record, form.offset_of(slot))
            is_whole = num_read == len(record)
            broken += not (is_whole and form.unseal(record, slot, segment.cipher) == digest)
    tier._read_buffers.give_back(memory)
    return broken


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save("llama3", tmp_path_factory.mktemp("killed"))


@pytest.fixture(scope="module")
def said(model: Path) -> list[list[int]]:
    """Return what an engine without a tier says to each prompt."""
    torch.set_num_threads(1)
    core = EngineCore(EngineConfig(**options(model, None, None)))
    return [answer(core, number)[0] for number in range(NUM_PROMPTS)]


def run_killed(asked: dict[str, Any], killed: Killed) -> tuple[int, list[tuple[Any, ...]]]:
    """Return how an engine left, and what it told."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    parent, child = context.Pipe(duplex=False)
    process = context.Process(target=live, args=(asked, killed, child))
    process.start()
    child.close()
    told: list[tuple[Any, ...]] = []
    try:
        while parent.poll(EXIT_S):
            told.append(parent.recv())
    except EOFError:
        pass
    parent.close()
    process.join(EXIT_S)
    assert process.exitcode is not None
    return process.exitcode, told


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_whatever_a_killed_engine_left_nothing_wrong_is_read(
    model: Path, said: list[list[int]], tmp_path: Path, is_encrypted: bool
) -> None:
    key_file = tmp_path / "key" if is_encrypted else None
    if key_file is not None:
        key_file.write_bytes(bytes(range(32)))
    rng = random.Random(f"kills {is_encrypted}")
    asked, num_killed, num_read = options(model, tmp_path / "kv", key_file), 0, 0
    while num_killed < NUM_KILLS // 2:
        order = [rng.randrange(NUM_PROMPTS) for _ in range(NUM_ASKED)]
        order[1::4] = order[::4]
        killed = Killed(rng.randint(1, MAX_WRITES), rng.randint(0, 8), order)
        status, told = run_killed(asked, killed)
        assert status in (0, -signal.SIGKILL)
        num_killed += status == -signal.SIGKILL
        for kind, *what in told:
            if kind == "found":
                assert what[1] == 0, "what is found is whole"
            elif kind == "said":
                number, text, tier_tokens = what
                assert text == said[number], json.dumps([number, killed.write, killed.pages])
                num_read += tier_tokens
    assert num_read > 0, "what was left was read all the same"


ENGINE = """
import sys
from engine import __main__ as engine
from engine.core.engine_core import EngineCore
from engine.tiers.policy import PrefillCosts

EngineCore._prefill_costs = lambda core: PrefillCosts(token_s=1.0)
sys.exit(engine.main(sys.argv[1:]))
"""


@NIGHT
async def test_an_engine_that_is_killed_at_any_moment_is_followed_by_one_that_is_right(
    model: Path, said: list[list[int]], tmp_path: Path
) -> None:
    """The process that a supervisor starts, asked on its socket; its costs alone are pretended."""
    address, key_file = f"unix:{tmp_path}/engine.sock", tmp_path / "key"
    key_file.write_bytes(bytes(range(32)))
    asked = ["--model", str(model), "--listen", address, "--device", "cpu", "--dtype", "float32"]
    asked += ["--num-blocks", str(NUM_BLOCKS), "--num-threads", "1", "--max-model-len", "200"]
    asked += ["--kv-disk", str(tmp_path / "kv"), "--kv-disk-bytes", str(DISK_BYTES)]
    asked += ["--kv-disk-encrypted", "--kv-key-file", str(key_file), "--log-level", "warning"]
    rng, num_read = random.Random("moments"), 0
    sampling = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    for _ in range(20):
        process = subprocess.Popen([sys.executable, "-c", ENGINE, *asked], cwd=ROOT)
        client = await EngineClient.connect(address, timeout_s=EXIT_S)
        for asked_number in range(rng.randint(4, 30)):
            number = rng.randrange(NUM_PROMPTS)
            request = EngineRequest(
                request_id=f"r{asked_number}", prompt_token_ids=prompt(number), sampling=sampling
            )
            outputs = await collect(client, request)
            assert [token for each in outputs for token in each.token_ids] == said[number]
            num_read += outputs[-1].usage.tier_tokens
        process.kill()  # what the last answers were worth is being written
        await client.close()
        assert process.wait(EXIT_S) == -signal.SIGKILL
    assert num_read > 0
