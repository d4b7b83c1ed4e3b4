"""Decode steps recorded once, for a few sizes, and replayed with one call.

Above: `device_runner.py`. Below: torch.cuda. Knows no model: what it records is a function without
arguments, which reads its inputs from places that do not move.

A decode launches some 300 kernels of a few microseconds each: issued one by one, they cost more
than the work itself. A step of any number of sequences uses the next larger graph; the difference
is padding. All graphs share one pool of memory, the largest is recorded first: the others fit into
what it needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

FINE_SIZES = (1, 2, 4)
STEP, COARSE_STEP = 8, 32
"""Between sizes, and between those above `FINE_TO`."""
FINE_TO = 256
LARGEST = 512
"""Larger decodes take so long that launching hides behind them."""
CAPTURE_BUDGET_S = 10.0


class Graph(Protocol):
    def replay(self) -> None:
        """Do again what was recorded."""


class GraphBackend(Protocol):
    def record(self, work: Callable[[], None]) -> Graph:
        """Record `work`, which must always use the same memory and never wait for the device."""

    def num_bytes(self) -> int:
        """Device memory that the graphs hold."""


class CudaGraphs:
    """`GraphBackend` of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._num_bytes = 0

    def record(self, work: Callable[[], None]) -> Graph:
        work()  # compiles kernels and lets libraries allocate: neither can be recorded
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads of this process may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        self._num_bytes += torch.cuda.memory_reserved(self._device) - before
        return graph

    def num_bytes(self) -> int:
        return self._num_bytes


class CalledGraphs:
    """Stands in for CUDA's where there are none: a replay calls the function that was recorded, on
    the buffers and with the numbers that it had then."""

    def record(self, work: Callable[[], None]) -> Graph:
        return _Call(work)

    def num_bytes(self) -> int:
        return 0


class _Call:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


def graph_sizes(most: int) -> list[int]:
    """Numbers of sequences to record a decode for, ascending, where `most` may run."""
    most = min(most, LARGEST)
    sizes = [*FINE_SIZES, *range(STEP, FINE_TO + 1, STEP)]
    sizes += range(FINE_TO + COARSE_STEP, LARGEST + 1, COARSE_STEP)
    return [size for size in sizes if size < most] + [most]


class DecodeGraphs:
    """Graphs by number of sequences."""

    def __init__(self, backend: GraphBackend, sizes: Sequence[int]) -> None:
        self._backend = backend
        self._wanted = sorted(sizes)
        self._graphs: dict[int, Graph] = {}
        self._size_for: list[int] = []
        """By number of sequences, the size of its graph."""

    def capture(
        self, prepare: Callable[[int], Callable[[], None]], budget_s: float = CAPTURE_BUDGET_S
    ) -> None:
        """prepare(size) returns what is to be recorded for that size. Behind the budget only powers
        of two are recorded: a start is not held up for a little padding."""
        start = time.perf_counter()
        for size in reversed(self._wanted):
            if time.perf_counter() - start > budget_s and size & (size - 1):
                continue
            self._graphs[size] = self._backend.record(prepare(size))
        recorded = sorted(self._graphs)
        self._size_for = [
            next(size for size in recorded if size >= number) for number in range(recorded[-1] + 1)
        ]
        logger.info(
            "recorded decodes of %d sizes up to %d in %.2f s, %.0f MiB%s",
            len(recorded),
            recorded[-1],
            time.perf_counter() - start,
            self._backend.num_bytes() / (1 << 20),
            "" if len(recorded) == len(self._wanted) else "; the others would have taken too long",
        )

    def padded(self, num_seqs: int) -> int | None:
        """The smallest graph for so many sequences; None where there is none."""
        return self._size_for[num_seqs] if num_seqs < len(self._size_for) else None

    def replay(self, size: int) -> None:
        self._graphs[size].replay()
