"""Measures roles with real engines: `bench.fleet roles --live`.

As many engines of penny in each layout, started by `tollgate up`, on all processors, with KV that
is read out of the other's memory. Requests come at random, as many a second in each layout, with
prompts that nobody asked before; layouts take turns, round by round. Two engines on two processors
show the mechanism: the engine that decodes and the one that computes a prompt share the machine's
memory and caches, so what is won or lost here is no claim about another machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import msgspec

from bench.fleet.live import WORDS, is_ready
from bench.gateway import process, wait_until_ready
from bench.sim.report import percentile
from bench.tools.ports import free_port
from bench.tools.record import record
from engine.protocol import ReplicaStatus
from engine.transport.client import EngineClient
from gateway.home import Home
from gateway.processes import credentials_file

LAYOUTS = {
    "2 both": "replicas = 2",
    "2 both, 128 a step": "replicas = 2\n[model.engine_options]\nmax_num_batched_tokens = 128",
    "1 + 1": "prefill = 1\ndecode = 1",
}
"""Keys of the settings, by the layout's name."""
TTFTS_S = (0.25, 0.5, 1.0, 2.0, 5.0)
TPOTS_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1)
CLEAR = 0.02
"""Shares of good requests that differ by less are alike."""
PROMPT_WORDS = (30, 150, 500)
"""One as often as another."""
ANSWER_TOKENS = (32, 96)
WARM_UP = 8
"""Requests of each length, one after the other: engines learn what steps and reads cost."""
TIMEOUT_S = 300.0
CONFIG = """
[[model]]
name = "penny"
path = "models/penny"
{layout}
"""
FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile")


class Answered(msgspec.Struct, frozen=True):
    """One stream, as its client saw it."""

    ttft_s: float
    tpot_s: float

    def is_good(self, ttft_s: float, tpot_s: float) -> bool:
        return self.ttft_s <= ttft_s and self.tpot_s <= tpot_s


class RoundResult(msgspec.Struct, frozen=True):
    answers: list[Answered]
    splits: int
    """Requests whose prompt one engine computed and another one went on with."""
    fetched_tokens: int
    read_token_s: float
    """Seconds that reading a token took the engine that read most."""


def run_live(asked: argparse.Namespace) -> int:
    found: dict[str, list[RoundResult]] = {name: [] for name in LAYOUTS}
    for number in range(asked.rounds):
        turn = list(LAYOUTS) if number % 2 == 0 else list(reversed(LAYOUTS))
        for name in turn:
            found[name].append(asyncio.run(run_round(LAYOUTS[name], asked, number)))
            print(f"round {number + 1}, {name}: {said(found[name][-1])}", flush=True)
    table = table_of({name: [a for r in each for a in r.answers] for name, each in found.items()})
    print(f"  {'TTFT':>6} {'TPOT':>8}  " + "  ".join(f"{each:>18}" for each in LAYOUTS))
    for row in table:
        shares = "  ".join(f"{row['good'][name]:18.3f}" for name in LAYOUTS)
        at = f"{row['ttft_s']:4g} s {1000 * row['tpot_s']:5g} ms"
        print(f"  {at}  {shares}  {row['winner']}")
    if not asked.dry:
        print(f"recorded in {record('fleet_roles_live', recorded(asked, found, table))}")
    return 0


def said(one: RoundResult) -> str:
    ttfts, tpots = ([getattr(each, name) for each in one.answers] for name in ("ttft_s", "tpot_s"))
    return (
        f"first token p50 {percentile(ttfts, 0.5):.3f} s, p90 {percentile(ttfts, 0.9):.3f} s; "
        f"others p50 {1000 * percentile(tpots, 0.5):.1f} ms, "
        f"p90 {1000 * percentile(tpots, 0.9):.1f} ms; {one.splits} of {len(one.answers)} moved, "
        f"{one.fetched_tokens} tokens read in {1e6 * one.read_token_s:.2f} us each"
    )


def table_of(answers: dict[str, list[Answered]]) -> list[dict[str, Any]]:
    """Return, for each pair of objectives, the share of good answers by layout, and who wins."""
    table = []
    for ttft_s in TTFTS_S:
        for tpot_s in TPOTS_S:
            good = {
                name: fmean(each.is_good(ttft_s, tpot_s) for each in found)
                for name, found in answers.items()
            }
            best = max(good.values())
            most = [name for name, share in good.items() if share > best - CLEAR]
            winner = "alike" if len(most) == len(good) else " / ".join(most)
            table.append({"ttft_s": ttft_s, "tpot_s": tpot_s, "good": good, "winner": winner})
    return table


def recorded(
    asked: argparse.Namespace, found: dict[str, list[RoundResult]], table: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "machine_was": asked.machine_was,
        "load_average": os.getloadavg()[0],
        "processor_has": features(Path("/proc/cpuinfo")),
        "model": "models/penny",
        "engines": 2,
        "read_by": "shared memory",
        "requests_per_s": asked.rate,
        "requests": sum(len(each.answers) for each in found["1 + 1"]),
        "prompt_words": PROMPT_WORDS,
        "answer_tokens": ANSWER_TOKENS,
        "rounds": {
            name: [
                {
                    "ttft_p50_s": percentile([e.ttft_s for e in each.answers], 0.5),
                    "ttft_p90_s": percentile([e.ttft_s for e in each.answers], 0.9),
                    "tpot_p50_s": percentile([e.tpot_s for e in each.answers], 0.5),
                    "tpot_p90_s": percentile([e.tpot_s for e in each.answers], 0.9),
                    "moved": each.splits,
                    "fetched_tokens": each.fetched_tokens,
                    "read_token_s": each.read_token_s,
                }
                for each in rounds
            ]
            for name, rounds in found.items()
        },
        "good": table,
    }


def features(info: Path) -> list[str]:
    """Return which of the features that count here the processor has."""
    flags = next((e for e in info.read_text().splitlines() if e.startswith("flags")), "").split()
    return [each for each in FEATURES if each in flags]


async def run_round(layout: str, asked: argparse.Namespace, number: int) -> RoundResult:
    with tempfile.TemporaryDirectory(prefix="tgl-", dir="/tmp") as folder:
        home, port, log = Home(Path(folder) / "home"), free_port(), Path(folder) / "log"
        config = Path(folder) / "tollgate.toml"
        config.write_text(CONFIG.format(layout=layout))
        command = [str(Path(sys.executable).parent / "tollgate"), "up", "--home", str(home.root)]
        command += ["--config", str(config), "--port", str(port)]
        with process(command, log, os.sched_getaffinity(0)) as started:
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(f"{url}/health/ready", started, log, lambda: is_ready(url, home))
            known = credentials_file.read(home.credentials)
            assert known is not None
            headers = {"Authorization": f"Bearer {known.api_key}"}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S) as http:
                return await measure(http, home, asked, random.Random(f"{asked.seed} {number}"))


async def measure(
    http: httpx.AsyncClient, home: Home, asked: argparse.Namespace, draw: random.Random
) -> RoundResult:
    """Ask so many requests at the rate, once the engines have learnt."""
    warm = random.Random("warm")
    for _ in range(WARM_UP):
        await asyncio.gather(*(ask(http, text_of(warm, each), 16) for each in PROMPT_WORDS))
    before = await statuses(home)
    moved_before = await moved(http)
    tasks = []
    for _ in range(asked.requests):
        await asyncio.sleep(draw.expovariate(asked.rate))
        text, tokens = text_of(draw, draw.choice(PROMPT_WORDS)), draw.choice(ANSWER_TOKENS)
        tasks.append(asyncio.create_task(ask(http, text, tokens)))
    answers = list(await asyncio.gather(*tasks))
    after = await statuses(home)
    fetched = sum(each.fetched_tokens for each in after) - sum(e.fetched_tokens for e in before)
    reader = max(after, key=lambda each: each.fetched_tokens)
    return RoundResult(
        answers=answers,
        splits=await moved(http) - moved_before,
        fetched_tokens=fetched,
        read_token_s=0.0 if reader.peer is None else reader.peer.read_token_s,
    )


def text_of(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))


async def ask(http: httpx.AsyncClient, text: str, tokens: int) -> Answered:
    """Read one streamed answer. Raises: RuntimeError, if it is not whole."""
    body = {
        "model": "penny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    began_s, first_s, last_s, is_whole = time.monotonic(), 0.0, 0.0, False
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            is_whole = is_whole or line == "data: [DONE]"
            if line.startswith("data: {") and has_token(line[6:]):
                last_s = time.monotonic()
                first_s = first_s or last_s
    if not is_whole or not first_s:
        raise RuntimeError("a stream was not answered whole")
    return Answered(first_s - began_s, (last_s - first_s) / (tokens - 1))


def has_token(data: str) -> bool:
    choices = json.loads(data)["choices"]
    return bool(choices) and bool(choices[0]["delta"].get("content"))


async def statuses(home: Home) -> Sequence[ReplicaStatus]:
    found = []
    for number in range(2):
        client = await EngineClient.connect(f"unix:{home.engine_socket(number)}", timeout_s=30)
        found.append(client.status)
        await client.close()
    return found


async def moved(http: httpx.AsyncClient) -> int:
    """Return how many requests were computed by one engine for another."""
    text = (await http.get("/metrics")).text
    lines = [each for each in text.splitlines() if 'reason="split"' in each]
    return int(sum(float(each.rpartition(" ")[2]) for each in lines))
