"""Measures the index of who has what cached: a look-up, its memory, and how late it is.

    look-up   processor time of finding a prompt of 2,000 blocks among 100 engines, by who has it
    memory    bytes of the table for each block that is cached somewhere
    writer    keys a second, and what a change of 40 keys costs
    lag       from an engine's answer to the place in the index, by way of the conductor's process

Processor times do not depend on how busy the machine is; the lag does.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.fleet.goals import FleetGoal, tell
from engine.fake.engine import FAKE_CONFIG, FakeCore
from engine.prefix_digests import SPAN_BLOCKS, span_keys
from engine.protocol import EngineRequest, SamplingParams
from engine.transport.client import EngineClient
from engine.transport.server import EngineServer
from gateway.fleet.conductor.index_writer import KvIndexWriter
from gateway.fleet.kv_index import KvIndex, table_bytes

NUM_ENGINES = 100
PROMPT_SPANS = 2000 // SPAN_BLOCKS
ROUNDS = 2000
CHANGED_KEYS = 40
MOST_US, MOST_BYTES, MOST_LAG_S = 60.0, 60.0, 0.15


def main(command: str, arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"bench.fleet {command}")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="cached by all together")
    parser.add_argument("--requests", type=int, default=200, help="whose lag is measured")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        look_up_us, bytes_a_block = measure_table(
            Path(folder) / "index", asked.blocks, random.Random(asked.seed)
        )
        lags = sorted(asyncio.run(measure_lag(Path(folder), asked.requests)))
    p50, p99 = (lags[int(share * (len(lags) - 1))] for share in (0.5, 0.99))
    print(f"lag of {len(lags)} prompts: p50 {1e3 * p50:.0f} ms")
    found = (
        ("us of a look-up at most, where some have parts of a prompt", look_up_us, MOST_US),
        ("bytes of the index a block", bytes_a_block, MOST_BYTES),
        ("seconds of lag at p99", p99, MOST_LAG_S),
    )
    return tell(
        [
            FleetGoal(name="G4", text=text, reached=reached, wanted=most, at_most=True)
            for text, reached, most in found
        ]
    )


def measure_table(path: Path, num_blocks: int, draw: random.Random) -> tuple[float, float]:
    """Return the microseconds of the longest look-up of those that a goal is about, and the bytes
    of a block."""
    engines = tuple(f"engine {number}" for number in range(NUM_ENGINES))
    num_spans = num_blocks // SPAN_BLOCKS
    writer = KvIndexWriter(path)
    for engine in engines:
        writer.add(engine, num_spans // NUM_ENGINES)
    writer.publish()
    told = [packed(keys_of(draw, num_spans // NUM_ENGINES)) for _ in engines]
    began = time.process_time()
    for engine, keys in zip(engines, told, strict=True):
        writer.store(engine, keys)
    speed = num_spans / (time.process_time() - began)
    bytes_a_block = table_bytes(writer.capacity) / (writer.num_spans * SPAN_BLOCKS)
    print(f"memory: {bytes_a_block:.1f} bytes a block, {writer.num_spans} spans of {num_blocks}")
    some = packed(keys_of(draw, CHANGED_KEYS))

    def change() -> None:
        writer.store(engines[0], some)
        writer.remove(engines[0], some)

    print(f"writer: {speed:,.0f} keys/s, {median_us(change) / 2:.0f} us for {CHANGED_KEYS} keys")
    prompt, index = keys_of(draw, PROMPT_SPANS), KvIndex(path)
    found = {}

    def look_up(what: str) -> None:
        found[what] = median_us(lambda: index.spans_held(prompt, engines))
        print(f"look-up, {what}: {found[what]:.1f} us")

    look_up("nobody has it")
    for engine in engines[:5]:
        writer.store(engine, packed(prompt[: draw.randrange(PROMPT_SPANS)]))
    look_up("five have parts of it")
    for engine in engines:
        writer.store(engine, packed(prompt[:10]))
    look_up("all have its beginning, five have more")
    longest = max(found.values())
    for engine in engines:
        writer.store(engine, packed(prompt[: draw.randrange(PROMPT_SPANS)]))
    look_up("each has another part of it")
    return longest, bytes_a_block


async def measure_lag(folder: Path, num_requests: int) -> list[float]:
    address, stop = f"unix:{folder / 'engine.sock'}", asyncio.Event()
    server = EngineServer(FakeCore(FAKE_CONFIG), address)
    serving = asyncio.create_task(server.serve(stop, drain_timeout_s=0.0))
    command = [sys.executable, "-m", "gateway", "conductor", "--log-level", "warning"]
    conductor = await asyncio.create_subprocess_exec(
        *command, "--index", str(folder / "lag"), "--engine", address
    )
    client = await EngineClient.connect(address, timeout_s=30)
    engines, index = (client.status.engine_id,), KvIndex(folder / "lag")
    lags = []
    try:
        for number in range(num_requests):
            prompt = [1 + number % 1000, 1 + number // 1000] * 64
            request = EngineRequest(
                request_id=f"{number}",
                prompt_token_ids=[*prompt, 5],
                sampling=SamplingParams(max_tokens=1),
            )
            async for _ in client.generate(request):
                pass
            await client.acknowledge(request.request_id)
            began, keys = time.perf_counter(), span_keys("", prompt, 16)
            while not index.spans_held(keys, engines)[0]:
                await asyncio.sleep(0.001)
            if number:  # the first one waits for the conductor to start
                lags.append(time.perf_counter() - began)
            await asyncio.sleep(random.uniform(0.0, 0.1))
    finally:
        conductor.terminate()
        await conductor.wait()
        await client.close()
        stop.set()
        await serving
    return lags


def median_us(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return 1e6 * sorted(times)[ROUNDS // 2]


def keys_of(draw: random.Random, number: int) -> list[int]:
    return [draw.getrandbits(64) | 1 for _ in range(number)]


def packed(keys: Sequence[int]) -> bytes:
    return b"".join(key.to_bytes(8, "little") for key in keys)
