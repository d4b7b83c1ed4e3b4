"""Decode steps recorded once, for a few sizes, and replayed with one call.

Knows no model: what it records is a function without arguments, which reads its inputs from places
that do not move.

A decode launches some 300 kernels of a few microseconds each: issued one by one, they cost more
than the work itself. A step of any number of sequences uses the next larger graph; the difference
is padding. All graphs share one pool of memory, the largest is recorded first: the others fit into
what it needed.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

logger = logging.getLogger(__name__)

FINE_SIZES = (1, 2, 4)
STEP, COARSE_STEP = 8, 32
"""Between sizes, and between those above `FINE_TO`."""
FINE_TO = 256
LARGEST = 512
"""Larger decodes take so long that launching hides behind them."""
SHORT = 4096
"""Tokens of a sequence up to which one graph serves all."""
CAPTURE_BUDGET_S = 10.0


Graph = Callable[[], None]
"""Does again what was recorded."""


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
        with torch.cuda.stream(self._stream), _no_collection():
            # Other threads of this process may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        self._num_bytes += torch.cuda.memory_reserved(self._device) - before
        return graph.replay

    def num_bytes(self) -> int:
        return self._num_bytes


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hold the garbage collector back: what it gives back to the device must not be recorded with
    the rest.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CalledGraphs:
    """Stands in for CUDA's where there are none: a replay calls the function that was recorded, on
    the buffers and with the numbers that it had then."""

    def record(self, work: Callable[[], None]) -> Graph:
        return work

    def num_bytes(self) -> int:
        return 0


class Decode(NamedTuple):
    """The bounds of the decodes that a graph is for: at most so many sequences of at most so many
    tokens, each with one new token or, where guesses are verified, with `queries` at most.
    """

    num_seqs: int
    max_seq_len: int
    adapted: bool = False
    """Some of them with an adapter: what adapters add is part of the work, or is not."""
    queries: int = 1

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.queries


def graph_sizes(most: int) -> list[int]:
    """Numbers of sequences to record decodes for, ascending, where `most` may run."""
    most = min(most, LARGEST)
    sizes = [*FINE_SIZES, *range(STEP, FINE_TO + 1, STEP)]
    sizes += range(FINE_TO + COARSE_STEP, LARGEST + 1, COARSE_STEP)
    return [size for size in sizes if size < most] + [most]


def decodes_to_record(
    most: int, max_seq_len: int, programs: Callable[[Decode], int]
) -> list[Decode]:
    """Sizes for short sequences, and, where longer ones would cost short ones something, fewer
    sizes for each doubling of the length.

    programs: how many share the keys of a sequence. A graph has as many as the longest sequence
    could need; those that have nothing to do end at once, but hundreds of thousands take time.
    """
    lengths = list[int]()
    while (length := SHORT << len(lengths)) < max_seq_len:
        lengths.append(length)
    lengths.append(max_seq_len)
    sizes, wanted = graph_sizes(most), list[Decode]()
    for size in sizes:
        every = [Decode(size, length) for length in lengths]
        # Of those with as many programs, the longest serves for all.
        unlike = list({programs(decode): decode for decode in every}.values())
        coarse = size & (size - 1) == 0 or size == sizes[-1]
        wanted += unlike if coarse else unlike[:1]
    return wanted


def _by_size(decode: Decode) -> tuple[int, Decode]:
    return decode.num_tokens, decode


class DecodeGraphs:
    """Graphs by what they are for."""

    def __init__(self, backend: GraphBackend, wanted: Iterable[Decode]) -> None:
        self._backend = backend
        self._wanted = sorted(wanted, key=_by_size, reverse=True)
        self._graphs: dict[Decode, Graph] = {}
        """In ascending order, when all are recorded."""

    def capture(
        self, prepare: Callable[[Decode], Callable[[], None]], budget_s: float = CAPTURE_BUDGET_S
    ) -> None:
        """prepare(decode) returns what is to be recorded for it. Behind the budget only powers of
        two are recorded: a start is not held up for a little padding."""
        start = time.perf_counter()
        recorded = {}
        for decode in self._wanted:
            late = time.perf_counter() - start > budget_s
            if not late or decode.num_seqs & (decode.num_seqs - 1) == 0:
                recorded[decode] = self._backend.record(prepare(decode))
        self._graphs = {decode: recorded[decode] for decode in sorted(recorded, key=_by_size)}
        logger.info(
            "recorded %d decodes of up to %d sequences in %.2f s, %.0f MiB%s",
            len(recorded),
            max(decode.num_seqs for decode in self._wanted),
            time.perf_counter() - start,
            self._backend.num_bytes() / (1 << 20),
            "" if len(recorded) == len(self._wanted) else "; more would have taken too long",
        )

    def find(self, needed: Decode) -> Decode | None:
        """The smallest that will do."""
        for decode in self._graphs:
            large = decode.num_seqs >= needed.num_seqs and decode.max_seq_len >= needed.max_seq_len
            # A plain decode is not padded to what verifies guesses.
            alike = (decode.queries > 1) == (needed.queries > 1)
            fits = alike and decode.queries >= needed.queries
            if large and fits and decode.adapted == needed.adapted:
                return decode
        return None

    def replay(self, decode: Decode) -> None:
        self._graphs[decode]()
