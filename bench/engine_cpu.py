"""Tokens per second of the engine on a processor, against every other engine that is installed.

`python -m bench.engine_cpu`: a model of the shape of SmolLM2-135M with random weights, in bfloat16,
with int8 weights beside it, and in float32, and a model of 15 M parameters in float32. For each: a
prefill of 512 tokens, decodes of 1, 8 and 32 sequences, and 64 mixed requests (prompts of 32-512,
answers of 16-256 tokens), greedy, EOS ignored; and the mixed requests as a burst, with the times of
their tokens. The processor's features are printed and recorded, and the machine's load before and
after: on a busy one ratios hold better than rates.

The roofline beside them is computed from rates that are measured first
(`bench/engine/cpu_roofline.py`), and nobody reaches it; each rate is printed with its ratio to
ours, and as a share of the roofline. Goals are ratios to the best of GOAL_PEERS in the same run. A
decode's rate is that of the answers' tokens after the first: the time of requests for one token is
subtracted. The engines take turns, and each figure is the median of its turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from bench.engine.cpu_roofline import MachineRates, Roofline
from bench.tools.record import record
from bench.tools.workload import SMALL_15M, SMOLLM2_135M, Request, alike, build_checkpoint, mixed
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.kernels.choice.machine import this_machine
from engine.models.decoder import Decoder
from engine.protocol import EngineRequest, SamplingParams

KV_CACHE_BYTES = 1 << 30
PROMPT, ANSWER, NUM_MIXED = 128, 129, 64
ITL_TARGET_S = 0.2
SETTLE_S = 0.5
"""Before each measurement, so that the threads of the engine before it have gone to sleep."""
PEERS = (
    "static_transformers",
    "continuous_transformers",
    "openvino_genai",
    "llama_cpp",
    "vllm",
)
INT8 = "ours in int8"
OWN_PROCESS = ("vllm",)
"""Peers whose processor's time is not this process's: `--cpu-time` leaves them out."""
GOAL_PEERS = ("OpenVINO GenAI", "vLLM", "llama.cpp")
GOALS = {"prefill 512": 1.0, "decode 1": 1.1, "decode 32": 1.1, "mixed": 1.1}
"""Our tokens per second over those of the best of GOAL_PEERS, at least."""
GOAL_ITL_P99_S = 0.25
"""The most that the burst may take between two tokens."""
MEASURES = ("prefill 512", "decode 1", "decode 8", "decode 32", "mixed")


Dtype = Literal["float32", "bfloat16"]


class Engine(Protocol):
    def run(self, requests: Sequence[Request]) -> None: ...


class Ours:
    def __init__(self, folder: Path, dtype: Dtype, **asked: Any) -> None:
        started = time.perf_counter()
        self.core = EngineCore(
            EngineConfig(
                model=folder,
                device="cpu",
                dtype=dtype,
                kv_cache_bytes=KV_CACHE_BYTES,
                **({"itl_target_s": 0.0, "prefix_caching": False} | asked),
            )
        )
        self.start_s = time.perf_counter() - started
        self._num_requests = 0

    def run(self, requests: Sequence[Request]) -> None:
        self.times(requests)

    def times(self, requests: Sequence[Request]) -> dict[str, list[float]]:
        """Seconds from the start at which each request's tokens came."""
        began = time.perf_counter()
        came: dict[str, list[float]] = {}
        for request in requests:
            sampling = SamplingParams(
                max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True
            )
            self._num_requests += 1
            name = str(self._num_requests)
            self.core.add(
                EngineRequest(request_id=name, prompt_token_ids=request.prompt, sampling=sampling)
            )
            came[name] = []
        while self.core.has_work():
            for output in self.core.step():
                came[output.request_id] += [time.perf_counter() - began] * len(output.token_ids)
        assert [len(c) for c in came.values()] == [r.num_output_tokens for r in requests]
        return came


Clock = Callable[[], float]


def timed(engine: Engine, requests: Sequence[Request], clock: Clock) -> float:
    time.sleep(SETTLE_S)
    began = clock()
    engine.run(requests)
    return clock() - began


def measure(engine: Engine, what: str, turn: int, clock: Clock) -> float:
    """Tokens per second."""
    kind, _, size = what.partition(" ")
    if kind == "mixed":
        asked = mixed(NUM_MIXED)
        return sum(request.num_output_tokens for request in asked) / timed(engine, asked, clock)
    if kind == "prefill":
        return int(size) / timed(engine, alike(1, int(size), 1, seed=turn), clock)
    prefill_s = timed(engine, alike(int(size), PROMPT, 1, seed=turn), clock)
    whole_s = timed(engine, alike(int(size), PROMPT, ANSWER, seed=turn), clock)
    return int(size) * (ANSWER - 1) / (whole_s - prefill_s)


def at_best(roofline: Roofline, what: str) -> float:
    """Tokens per second that the machine's memory and multipliers would allow."""
    kind, _, size = what.partition(" ")
    if kind == "mixed":
        asked = mixed(NUM_MIXED)
        return sum(request.num_output_tokens for request in asked) / roofline.mixed_s(asked)
    count = int(size)
    if kind == "prefill":
        return count / roofline.prefill_s(count)
    return count / roofline.decode_s(count, count * (PROMPT + ANSWER // 2))


def compare(
    engines: dict[str, Engine],
    measures: Sequence[str],
    turns: int,
    clock: Clock,
    roofline: Roofline,
) -> dict[str, Any]:
    """{measure: {engine: tokens per second}}, printed with ratios to the first engine's, and as
    shares of the roofline."""
    for engine in engines.values():
        engine.run(alike(4, 64, 4, seed=-1))
    first = next(iter(engines))
    table: dict[str, Any] = {}
    for what in measures:
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(1 if what == "mixed" else turns):
            for name, engine in engines.items():
                rates[name].append(measure(engine, what, turn, clock))
        row = {name: round(statistics.median(found), 1) for name, found in rates.items()}
        best = round(at_best(roofline, what), 1)
        cells = [
            f"{name} {rate:.0f} ({row[first] / rate:.2f}; {rate / best:.0%})"
            for name, rate in row.items()
        ]
        table[what] = row | {"roofline": best}
        cells.append(f"roofline {best:.0f}")
        print(f"  {what:<12} {'   '.join(cells)}", flush=True)
    return table


def burst(engine: Ours) -> dict[str, float]:
    """64 requests at once: seconds to the first token, and between tokens."""
    came = engine.times(mixed(NUM_MIXED))
    first = sorted(times[0] for times in came.values())
    between = sorted(
        after - before
        for times in came.values()
        for before, after in zip(times, times[1:], strict=False)
    )
    found = {
        f"{what}_p{percent}_s": round(values[min(len(values) * percent // 100, len(values) - 1)], 4)
        for what, values in (("ttft", first), ("itl", between))
        for percent in (50, 99)
    }
    print(f"  burst of {NUM_MIXED}: {found}; goal: itl_p99_s {GOAL_ITL_P99_S}", flush=True)
    return found


def compare_int8(table: dict[str, Any]) -> dict[str, float]:
    """Print and return what int8 weights gain, by measure."""
    gain = {what: round(row[INT8] / row["ours"], 2) for what, row in table.items()}
    print(f"  int8 over bfloat16: {gain}")
    return gain


def compare_goals(table: dict[str, Any]) -> dict[str, float]:
    """Print and return our rate over that of the best peer, by measure that has a goal."""
    found: dict[str, float] = {}
    for what, goal in GOALS.items():
        row = table.get(what, {})
        if peers_there := [name for name in GOAL_PEERS if name in row]:
            best = max(peers_there, key=lambda name: row[name])
            found[what] = round(row["ours"] / row[best], 2)
            print(f"  {what:<12} {found[what]:.2f} of {best}; the goal is {goal:.1f}")
    return found


def overhead_s(engine: Ours, num_seqs: int) -> float:
    """Seconds of a decode step outside the model: scheduling, building the batch, sampling. Of the
    processor's time of this thread; the median of the steps."""
    inside = [0.0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.thread_time()
            result = call(*args)
            inside[0] += time.thread_time() - began
            return result

        return run

    parts = {name: getattr(Decoder, name) for name in ("states", "logits")}
    for name, call in parts.items():
        setattr(Decoder, name, counted(call))
    outside = []
    for request in alike(num_seqs, 16, 40, seed=99):
        engine._num_requests += 1
        sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        name = str(engine._num_requests)
        engine.core.add(
            EngineRequest(request_id=name, prompt_token_ids=request.prompt, sampling=sampling)
        )
    while engine.core.has_work():
        inside[0], began = 0.0, time.thread_time()
        engine.core.step()
        outside.append(time.thread_time() - began - inside[0])
    for name, call in parts.items():
        setattr(Decoder, name, call)
    print(f"  outside the model, {num_seqs} decodes: {statistics.median(outside) * 1e3:.2f} ms")
    return round(statistics.median(outside), 6)


def peers(folder: Path, dtype: str, wanted: Sequence[str], openvino: Path | None) -> Any:
    found: dict[str, Engine] = {}
    for name in wanted:
        module = importlib.import_module(f"bench.peers.{name}")
        place = openvino if name == "openvino_genai" else folder
        if not module.installed():
            continue
        if place is None:
            print(f"  {module.NAME} is left out: --openvino names no model of this shape")
            continue
        found[module.NAME] = module.Peer(place, dtype)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=["bfloat16", "float32", "15M"])
    parser.add_argument("--measures", nargs="*", default=MEASURES)
    parser.add_argument("--peers", nargs="*", default=PEERS)
    parser.add_argument("--openvino", type=Path, help="the model of 135 M, converted")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="rates by the processor's time: for one thread on a busy machine",
    )
    parser.add_argument("--no-burst", action="store_true")
    parser.add_argument("--name", help="what the record is called, where it is a part of all")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    left_out = OWN_PROCESS if arguments.cpu_time else ()
    wanted = [name for name in arguments.peers if name not in left_out]
    result: dict[str, Any] = {"torch": torch.__version__, "threads": arguments.threads}
    result["seconds_of"] = "the processor" if arguments.cpu_time else "the clock"
    result["load_average"] = [os.getloadavg()[0]]
    rates, here = MachineRates.measure(), this_machine()
    result["processor"], result["features"] = here.processor, list(here.features)
    result["rates"] = dataclasses.asdict(rates)
    print(f"{here.processor}: {' '.join(here.features)}; {arguments.threads} threads\n{rates}")
    for model in arguments.models:
        shape = SMALL_15M if model == "15M" else SMOLLM2_135M
        dtype: Dtype = "bfloat16" if model == "bfloat16" else "float32"
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            build_checkpoint(folder, shape, dtype)
            ours = Ours(folder, dtype)
            print(f"{model}: started in {ours.start_s:.2f} s")
            found: dict[str, Any] = {"start_s": round(ours.start_s, 2)}
            # Alone, as it is served; a first run of a size makes its buffers.
            found["overhead_s_32"] = statistics.median(overhead_s(ours, 32) for _ in range(5))
            engines: dict[str, Engine] = {"ours": ours}
            if model == "bfloat16":
                engines[INT8] = Ours(folder, dtype, quantization="int8")
            openvino = None if model == "15M" else arguments.openvino
            engines |= peers(folder, dtype, wanted, openvino)
            roofline = Roofline.of(shape, dtype, rates)
            found["tokens_per_s"] = compare(
                engines, arguments.measures, arguments.turns, clock, roofline
            )
            found["over_the_best_peer"] = compare_goals(found["tokens_per_s"])
            if model == "bfloat16":
                found["int8_over_bfloat16"] = compare_int8(found["tokens_per_s"])
            if model == "bfloat16" and not arguments.no_burst:
                found["burst"] = burst(Ours(folder, dtype, itl_target_s=ITL_TARGET_S))
            result[model] = found
    result["load_average"].append(os.getloadavg()[0])
    if not arguments.dry:
        threads = arguments.threads
        name = "engine_cpu" if threads == len(os.sched_getaffinity(0)) else f"engine_cpu_{threads}t"
        print(f"recorded in {record(arguments.name or name, result)}")


if __name__ == "__main__":
    main()
