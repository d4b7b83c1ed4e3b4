"""`bench.fleet live`: the hit rate of several real engines against that of one with as much cache.

Agents talk to penny by `tollgate up`, each turn with all of its conversation before it and no key
of the client's. First one engine has all the cache, then `--replicas` engines have an equal part
each: an agent that is sent to another engine than before finds nothing there, and pushes out what
others have. What is cached at the end of all turns together would not fit one part.

Between two turns an agent does something else for a while (`--pause-s`). The shorter that is, the
more requests wait, and the more often an engine that has less of a prompt answers sooner.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import httpx

from bench.fleet.goals import FleetGoal, tell
from bench.gateway import process, wait_until_ready
from bench.tools.ports import free_port
from engine.transport.client import EngineClient
from gateway.home import Home
from gateway.processes import credentials_file

SHARED_BLOCKS = 3200
"""KV blocks of 16 tokens, of all engines of an installation together."""
SYSTEM_WORDS, TURN_WORDS, ANSWER_TOKENS = 60, 60, 16
TIMEOUT_S = 300.0
LEAST_SHARE = 0.9
CONFIG = """
[[model]]
name = "penny"
path = "models/penny"
replicas = {replicas}
[model.engine_options]
num_blocks = {blocks}
"""
WORDS = Path(__file__).read_text().split()


class Outcome:
    """Says what the engines of an installation counted."""

    def __init__(self, hit: int, queried: int, by_engine: list[int], took_s: float) -> None:
        self.rate = hit / queried
        self.text = f"{hit} of {queried} prompt tokens cached ({100 * self.rate:.1f} %), "
        self.text += f"{by_engine} tokens asked of each engine, {took_s:.0f} s"


def main(command: str, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=f"bench.fleet {command}", description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument(
        "--pause-s",
        type=float,
        default=2.0,
        help="what an agent does between two turns, on average",
    )
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    found = {}
    for replicas in (1, asked.replicas):
        outcome = asyncio.run(run_installation(replicas, asked))
        found[replicas] = outcome.rate
        print(f"{replicas} x {SHARED_BLOCKS // replicas} blocks: {outcome.text}")
    return tell(
        [
            FleetGoal(
                name="G5",
                text=f"hit rate of {asked.replicas} engines over that of one with all the cache",
                reached=found[asked.replicas] / found[1],
                wanted=LEAST_SHARE,
            )
        ]
    )


async def run_installation(replicas: int, asked: argparse.Namespace) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="live-") as folder:
        home, port, log = Home(Path(folder) / "home"), free_port(), Path(folder) / "log"
        config = Path(folder) / "tollgate.toml"
        config.write_text(CONFIG.format(replicas=replicas, blocks=SHARED_BLOCKS // replicas))
        command = [str(Path(sys.executable).parent / "tollgate"), "up", "--home", str(home.root)]
        command += ["--config", str(config), "--port", str(port)]
        with process(command, log, os.sched_getaffinity(0)) as started:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(f"{url}/health/ready", started, log, lambda: is_ready(url, home))
            began = time.monotonic()
            await talk(url, home, asked)
            return await count(home, replicas, time.monotonic() - began)


def is_ready(url: str, home: Home) -> bool:
    """Tell whether a key is there and the models are."""
    ready = httpx.get(f"{url}/health/ready", timeout=2).status_code == 200
    return ready and home.credentials.exists()


async def talk(url: str, home: Home, asked: argparse.Namespace) -> None:
    known = credentials_file.read(home.credentials)
    assert known is not None
    headers = {"Authorization": f"Bearer {known.api_key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
        async with asyncio.TaskGroup() as agents:
            for number in range(asked.agents):
                draw = random.Random(f"{asked.seed} {number}")
                agents.create_task(converse(client, draw, asked.turns, asked.pause_s))


async def converse(
    client: httpx.AsyncClient, draw: random.Random, turns: int, pause_s: float
) -> None:
    system = " ".join(WORDS[:SYSTEM_WORDS])
    messages = [{"role": "system", "content": system}]
    for _ in range(turns):
        await asyncio.sleep(draw.expovariate(1 / pause_s))
        text = " ".join(draw.choices(WORDS, k=TURN_WORDS))
        messages.append({"role": "user", "content": text})
        body = {"model": "penny", "messages": messages, "max_tokens": ANSWER_TOKENS}
        answered = await client.post("/v1/chat/completions", json=body)
        message = answered.raise_for_status().json()["choices"][0]["message"]
        messages.append({"role": "assistant", "content": message["content"] or ""})


async def count(home: Home, replicas: int, took_s: float) -> Outcome:
    """Ask the engines what they counted."""
    hit, queried = 0, []
    for number in range(replicas):
        socket = home.engine_socket(number)
        client = await EngineClient.connect(f"unix:{socket}", timeout_s=30)
        hit += client.status.prefix_cache_hit_tokens
        queried.append(client.status.prefix_cache_query_tokens)
        await client.close()
    return Outcome(hit, sum(queried), queried, took_s)
