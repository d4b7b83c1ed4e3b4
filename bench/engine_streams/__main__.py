"""Measures what tokens of an engine of ours cost behind gateway and socket, over the engine alone.

`python -m bench.engine_streams [--streams N] [--tokens N] [--rounds N] [--dry]`: penny
on one thread. Alone: the engine's core answers N requests in this process. Served: `tollgate up`
answers the same N, to the token, as streams of chat completions. Each side's processor time is
counted, the served one's of the engine's process and of the worker apart; rounds are taken in
turns, and the figures are the medians. What a client takes is not counted.

Counts of processor time hold on a busy machine, too; but a worker that is kept waiting gets several
tokens at once and has less to do, so the events of each stream are counted as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from bench.engine_cpu import Dtype, Ours
from bench.gateway import process, process_s, wait_until_ready
from bench.idle.__main__ import kind_of
from bench.tools.ports import free_port
from bench.tools.record import record
from bench.tools.workload import Request
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer

PENNY = Path(__file__).parents[2] / "models" / "penny"
DTYPE: Dtype = "bfloat16"
"""Both sides compute in it; by itself an engine chooses by the processor."""
GOAL = 0.15
PROMPT = [{"role": "user", "content": "Tell me something about tollgates, please."}]
WARM_UP_TOKENS = 8
SETTLE_S = 2.0
"""After a round, what is left of its requests is done: settled, shipped, acknowledged."""
SETTINGS = """[[model]]
name = "penny"
path = "{path}"
[model.engine_options]
num_threads = 1
dtype = "{dtype}"
"""


async def stream(port: int, key: str, tokens: int) -> int:
    """Read one streamed answer; count its events."""
    body = json.dumps(
        {
            "model": "penny",
            "messages": PROMPT,
            "stream": True,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    if b" 200 " not in answer.split(b"\r\n", 1)[0] or b"data: [DONE]" not in answer:
        raise SystemExit(f"no stream: {answer[:500]!r}")
    return answer.count(b"data: ") - 1


async def streams(port: int, key: str, count: int, tokens: int) -> float:
    """Read so many at once; the mean number of events of one."""
    return statistics.mean(await asyncio.gather(*(stream(port, key, tokens) for _ in range(count))))


class Served:
    """`tollgate up` with penny, for as long as `stack` is open."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.port, home = free_port(), folder / "home"
        settings = folder / "tollgate.toml"
        settings.write_text(SETTINGS.format(path=PENNY, dtype=DTYPE))
        command = [str(Path(sys.executable).parent / "tollgate"), "up", "--home", str(home)]
        command += ["--port", str(self.port), "--config", str(settings), "--workers", "1"]
        log = folder / "log"
        started = stack.enter_context(process(command, log, os.sched_getaffinity(0)))
        wait_until_ready(f"http://127.0.0.1:{self.port}/health/ready", started, log)
        self.key = json.loads((home / "credentials.json").read_text())["api_key"]
        tree = psutil.Process(started.pid).children(recursive=True)
        self.pids = {kind: each.pid for each in tree if (kind := kind_of(each)) is not None}

    def round(self, count: int, tokens: int) -> dict[str, float]:
        """Processor seconds by process, and the events of a stream."""
        before = {kind: process_s(pid) for kind, pid in self.pids.items()}
        events = asyncio.run(streams(self.port, self.key, count, tokens))
        time.sleep(SETTLE_S)
        spent = {kind: process_s(pid) - before[kind] for kind, pid in self.pids.items()}
        return spent | {"events": events}


def alone(engine: Ours, prompt: list[int], count: int, tokens: int) -> float:
    """Processor seconds of the core for the same requests."""
    began = time.process_time()
    engine.run([Request(prompt, tokens) for _ in range(count)])
    return time.process_time() - began


def compare(count: int, tokens: int, rounds: int) -> dict[str, Any]:
    engine = Ours(PENNY, DTYPE, num_threads=1, prefix_caching=True)
    text = ChatTemplate.load(PENNY).render(PROMPT)
    prompt = Tokenizer.load(PENNY).encode(text)
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tge-", dir="/tmp")))
        served = Served(folder, stack)
        for turn in range(rounds + 1):
            size = tokens if turn else WARM_UP_TOKENS
            seconds = {"alone": alone(engine, prompt, count, size)} | served.round(count, size)
            if turn:
                for name, value in seconds.items():
                    found.setdefault(name, []).append(value)
    row = {name: statistics.median(values) for name, values in found.items()}
    row["cost"] = (row["engine"] + row["worker"]) / row["alone"] - 1
    return {name: round(value, 4) for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="record nothing")
    asked = parser.parse_args()
    row = compare(asked.streams, asked.tokens, asked.rounds)
    per_token = 1e6 / (asked.streams * asked.tokens)
    print(f"{asked.streams} streams of {asked.tokens} tokens, processor time of a token:")
    for name in ("alone", "engine", "worker"):
        print(f"  {name:<8}{row[name] * per_token:8.1f} us")
    print(f"  cost over the engine alone: {row['cost']:.1%} (goal: {GOAL:.0%})")
    print(f"  events of a stream: {row['events']:.0f}")
    if not asked.dry:
        result = {"streams": asked.streams, "tokens": asked.tokens, "seconds": row}
        print(f"recorded in {record('engine_streams', result)}")


if __name__ == "__main__":
    main()
