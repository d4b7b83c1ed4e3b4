"""`python -m bench.fleet replicas [--replicas 1 2] [--streams N] [--tokens N] [--rounds N]`: what
further engines of one model bring on this machine, and what one of them that dies takes along.

For each number `tollgate up` serves penny with so many replicas, on all processors. Rounds of
streamed chat completions, each with a prompt of its own, tell tokens a second, how long first
tokens take, and the processor time of engines. Then the last engine is killed within a round:
streams at the others have to end well, and each new request has to be answered.

Tokens a second and times mean nothing on a busy machine; processor time and what fails do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.gateway import process, process_s, wait_until_ready
from bench.idle.__main__ import kind_of
from bench.sim.report import percentile
from bench.tools.ports import free_port
from bench.tools.record import record

PENNY = Path(__file__).parents[2] / "models" / "penny"
WORDS = "toll gate road bridge river stone coin night cart horse lamp rain".split()
PROMPT_WORDS = 200
WARM_UP_TOKENS = 4
KILL_AFTER_S = 0.5
AFTERWARDS = 8
"""Requests that begin once an engine was killed, one after the other."""
SETTINGS = '[[model]]\nname = "penny"\npath = "{path}"\nreplicas = {replicas}\n'


class Answer(NamedTuple):
    """One stream, as its client saw it."""

    is_whole: bool
    first_s: float
    """From the request to the first event that shows a token."""
    took_s: float


class Served:
    """A gateway that serves penny. `seed`: of the prompts."""

    def __init__(self, port: int, key: str, engines: list[psutil.Process], seed: int) -> None:
        self.port, self.key, self.engines = port, key, engines
        self._drawn = random.Random(seed)

    async def ask(self, tokens: int) -> Answer:
        """Read one streamed answer to a prompt that nobody asked before."""
        text = " ".join(self._drawn.choices(WORDS, k=PROMPT_WORDS))
        asked = {
            "model": "penny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "min_tokens": tokens,
            "stream": True,
        }
        body = json.dumps(asked).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n"
            f"authorization: Bearer {self.key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head.encode() + body)
        answer, first_s = b"", 0.0
        while piece := await reader.read(65536):
            answer += piece
            if not first_s and b'"content":"' in answer.replace(b'"content":""', b""):
                first_s = time.monotonic() - began
        writer.close()
        is_whole = b"data: [DONE]" in answer and b'"error"' not in answer
        return Answer(is_whole, first_s, time.monotonic() - began)

    async def asks(self, count: int, tokens: int) -> list[Answer]:
        return list(await asyncio.gather(*(self.ask(tokens) for _ in range(count))))

    async def round(self, count: int, tokens: int) -> dict[str, float]:
        """Ask so many at once. Raises: SystemExit if one is not answered."""
        before = sum(process_s(each.pid) for each in self.engines)
        began = time.monotonic()
        answers = await self.asks(count, tokens)
        took_s = time.monotonic() - began
        if not all(each.is_whole for each in answers):
            raise SystemExit("a stream was not answered whole")
        spent_s = sum(process_s(each.pid) for each in self.engines) - before
        firsts = [each.first_s for each in answers]
        return {
            "tokens_per_s": count * tokens / took_s,
            "ttft_p50_s": percentile(firsts, 0.5),
            "ttft_p99_s": percentile(firsts, 0.99),
            "engine_us_per_token": 1e6 * spent_s / (count * tokens),
        }

    async def lose_one(self, count: int, tokens: int) -> dict[str, Any]:
        """Kill the last engine while streams are under way, and ask on."""
        under_way = asyncio.create_task(self.asks(count, tokens))
        await asyncio.sleep(KILL_AFTER_S)
        self.engines[-1].send_signal(signal.SIGKILL)
        later = [await self.ask(WARM_UP_TOKENS) for _ in range(AFTERWARDS)]
        broken = sum(not each.is_whole for each in await under_way)
        return {
            "streams": count,
            "streams_broken": broken,
            "asked_afterwards": AFTERWARDS,
            "refused_afterwards": sum(not each.is_whole for each in later),
            "longest_afterwards_s": max(each.took_s for each in later),
        }


def measure(replicas: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Measure one number of replicas."""
    with tempfile.TemporaryDirectory(prefix="tgr-", dir="/tmp") as name:
        folder, port = Path(name), free_port()
        settings, home, log = folder / "tollgate.toml", folder / "home", folder / "log"
        settings.write_text(SETTINGS.format(path=PENNY, replicas=replicas))
        command = [str(Path(sys.executable).parent / "tollgate"), "up", "--home", str(home)]
        command += ["--port", str(port), "--config", str(settings)]
        with process(command, log, os.sched_getaffinity(0)) as started:
            wait_until_ready(
                "", started, log, lambda: "Tollgate is ready" in log.read_text(errors="replace")
            )
            key = json.loads((home / "credentials.json").read_text())["api_key"]
            tree = psutil.Process(started.pid).children(recursive=True)
            engines = sorted((each for each in tree if kind_of(each) == "engine"), key=command_of)
            served = Served(port, key, engines, replicas)
            return {"replicas": replicas} | asyncio.run(all_of(served, asked))


def command_of(engine: psutil.Process) -> list[str]:
    return list(engine.cmdline())


async def all_of(served: Served, asked: argparse.Namespace) -> dict[str, Any]:
    await served.round(asked.streams, WARM_UP_TOKENS)
    rounds = [await served.round(asked.streams, asked.tokens) for _ in range(asked.rounds)]
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    memory = sum(each.memory_info().rss for each in served.engines) / 1e6
    lost = await served.lose_one(asked.streams, asked.tokens)
    return {**medians, "engines_mb": memory, "one_killed": lost}


def main(command: str, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"bench.fleet {command}")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="record nothing")
    asked = parser.parse_args(arguments)
    rows = [measure(number, asked) for number in asked.replicas]
    for row in rows:
        lost = row["one_killed"]
        print(
            f"{row['replicas']} engines: {row['tokens_per_s']:.0f} tokens/s, first token p50 "
            f"{row['ttft_p50_s']:.2f} s, p99 {row['ttft_p99_s']:.2f} s, "
            f"{row['engine_us_per_token']:.0f} us of processor time a token, "
            f"{row['engines_mb']:.0f} MB; one killed: {lost['streams_broken']} of "
            f"{lost['streams']} streams broken, {lost['refused_afterwards']} of "
            f"{lost['asked_afterwards']} refused afterwards, the longest took "
            f"{lost['longest_afterwards_s']:.1f} s"
        )
    failed = [
        row["replicas"]
        for row in rows
        if row["replicas"] > 1 and row["one_killed"]["refused_afterwards"]
    ]
    print(
        f"goal: with several engines nobody is refused afterwards: {'not met' if failed else 'met'}"
    )
    if not asked.dry:
        print(f"recorded in {record('fleet_replicas', {'rows': rows})}")
    return 1 if failed else 0
