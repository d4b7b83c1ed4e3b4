"""Defines where checks and rows run: a GPU with real sizes, or the interpreter with tiny ones; and
a clock.

Knows no kernel and no engine.

In the interpreter there is no bfloat16 (it is silently wrong there): float16 stands for it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
NEEDED = ("numpy", "torch", "triton", "msgspec", "jinja2", "safetensors", "tokenizers")
FLUSH_BYTES = 256 << 20
"""Written between two timed calls: several times any L2, so that each finds its inputs in memory.
"""
MIN_CALLS = 3


@dataclass(frozen=True, slots=True)
class Place:
    device: torch.device
    tiny: bool

    @property
    def half(self) -> torch.dtype:
        return torch.float16 if self.tiny else torch.bfloat16

    def pick(self, real: T, tiny: T) -> T:
        return tiny if self.tiny else real

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def randn(self, *size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        drawn = torch.randn(size, generator=self.generator(seed), device=self.device)
        return drawn.to(dtype)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return "interpreter, tiny shapes"

    def median_s(self, call: Callable[[], object], seconds: float = 0.3) -> float:
        """Return the median seconds of a call on the device, its inputs not in the L2; as many
        calls as take `seconds`. Of one call in the interpreter, where it says nothing.
        """
        if self.device.type != "cuda":
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        call()  # compiles
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        measured: list[float] = []
        self.synchronize()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(measured) < MIN_CALLS:
            pairs = []
            for _ in range(MIN_CALLS):
                begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                begin.record()
                call()
                done.record()
                pairs.append((begin, done))
            self.synchronize()
            measured += [begin.elapsed_time(done) / 1e3 for begin, done in pairs]
        return statistics.median(measured)


def missing() -> list[str]:
    """Packages that are needed and not there."""
    from importlib.util import find_spec

    return [name for name in NEEDED if find_spec(name) is None]


def place(device: str, *, tiny: bool) -> Place:
    """Must be called before anything imports triton. SystemExit with one line when that place is
    not there."""
    lacking = missing()
    if lacking:
        raise SystemExit(
            f"not installed: {', '.join(lacking)}; unpack their wheels into a folder and put it on "
            "PYTHONPATH"
        )
    if device == "cpu":
        if not tiny:
            raise SystemExit("--device cpu is Triton's interpreter: only --tiny fits there")
        os.environ["TRITON_INTERPRET"] = "1"
        import triton  # noqa: F401  (who turns the interpreter on imports it)

        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device; --device cpu --tiny tries the script itself")
    return Place(torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"), tiny)
