"""A run of kernels recorded once and played again in one call.

Knows neither layers nor operations, but for the arguments that differ from step to step: those of
attention, which its plan hands over.

A layer is nine kernels of some ten microseconds each; from Python each call costs as much again,
and more where a large step has emptied the caches between two of them.
While a `Recorder` is active, kernels run as always and their arguments are kept. Playing them again
needs the same memory: what a layer allocates comes from one of two arenas, by turns, because a
layer reads what the one before it left. Anything else that touches a tensor meanwhile would be
missing when the program is played, so it makes the recording void.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.choice.threads import Team
from engine.kernels.cpu import backend as cpu_backend
from engine.kernels.cpu.backend import Call

Varying = dict[str, tuple[int, tuple[int, ...]]]
"""For each kind of call whose arguments change between steps: the first that does, and those."""
Pair = tuple[Tensor, Tensor]
Layers = Callable[[Tensor, Callable[[], None]], Pair]
"""Runs all layers on a residual stream, which it changes; calls the function before each layer.
Returns what the last layer has to add, and the stream."""

MAX_TOKENS = 512
"""The largest step that is replayed."""
SMALL_TOKENS = 64
"""Steps of up to so many tokens are recorded when they first come, and choose their threads. Larger
ones have many sizes, of which most never come again."""
KEPT_SIZES = 32
"""The number of latest steps that are remembered though not recorded: one of the same size is."""
MAX_PROGRAMS = 256
MAX_ALLOCATIONS = 32
"""The bound on allocations of one layer."""
WIDTH = 24
"""Arguments of a kernel, at most."""
VIEWS = frozenset(
    {
        torch.ops.aten.view.default,
        torch.ops.aten.view.dtype,
        torch.ops.aten.select.int,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.alias.default,
        torch.ops.aten.detach.default,
    }
)
"""Operations that only make another view of the same memory and need no replay."""
ALIGNMENT = 64


class Arenas:
    """Memory that all programs of a model share: only one of them runs."""

    def __init__(self, size: int) -> None:
        """size: bytes of what a layer allocates."""
        self._memory = torch.empty(2, size, dtype=torch.uint8)
        self._turn = 0
        self._used = 0

    def turn(self) -> None:
        """The next layer begins: what the last but one left is free."""
        self._turn = 1 - self._turn
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """None when the arena is full."""
        count = 1
        for size in shape:
            count *= size
        start = self._used
        stop = start + count * dtype.itemsize
        if stop > self._memory.shape[1]:
            return None
        self._used = -(-stop // ALIGNMENT) * ALIGNMENT
        return self._memory[self._turn, start:stop].view(dtype).view(*shape)


class Recorder(TorchDispatchMode):
    """`with` it, kernels are recorded."""

    def __init__(self, arenas: Arenas) -> None:
        super().__init__()
        self.arenas = arenas
        self.calls: list[Call] = []
        self.void = False
        """Something happened that cannot be played again."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled by torch here; the default imports its compiler, which takes a second
        of each start."""
        return False

    def __enter__(self) -> Recorder:
        cpu_backend.record(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        cpu_backend.record(None)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.reshape.default:
            self.void |= result.data_ptr() != args[0].data_ptr()
        elif func not in VIEWS:
            self.void = True
        return result

    def started(self, call: Call) -> None:
        """See `cpu_backend.Recording`."""
        self.calls.append(call)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `cpu_backend.Recording`."""
        found = self.arenas.empty(shape, dtype)
        if found is None:
            self.void = True
            return torch.empty(shape, dtype=dtype)
        return found


class Program:
    """Recorded kernels. They start with `first`, end in `last`; the next run overwrites both."""

    def __init__(self, calls: Sequence[Call], first: Tensor, last: Tensor) -> None:
        self._first = first
        self._last = last
        self._kernels = np.array([call.kernel for call in calls], np.int64)
        self._table = np.zeros((len(calls), WIDTH), np.int64)
        rows: dict[str, list[int]] = {}
        for row, call in enumerate(calls):
            self._table[row, : len(call.arguments)] = call.arguments
            if call.varies:
                rows.setdefault(call.varies, []).append(row)
        self._rows = {name: np.array(found) for name, found in rows.items()}
        self._arguments = (
            self._kernels.ctypes.data,
            self._table.ctypes.data,
            WIDTH,
            len(calls),
            cpu_backend.barrier(),
        )

    def play(self, residual: Tensor, varying: Varying, threads: int) -> tuple[Tensor, Tensor]:
        self._first.copy_(residual)
        self._table[:, 0] = 0
        for name, (start, values) in varying.items():
            self._table[self._rows[name], start : start + len(values)] = values
        run = cpu_backend.kernel("program", "run_program")
        cpu_backend.start(run, self._arguments, threads)
        return self._last, self._first


class LayerPrograms:
    """The layers of one model as programs, one for each number of tokens."""

    def __init__(self, bytes_per_token: int) -> None:
        """bytes_per_token: what a layer allocates, without alignment."""
        self._arena_bytes = MAX_TOKENS * bytes_per_token + MAX_ALLOCATIONS * ALIGNMENT
        self._arenas: Arenas | None = None
        self._programs: dict[tuple[int, int], Program | None] = {}
        self._sizes: deque[tuple[int, int]] = deque(maxlen=KEPT_SIZES)
        """The large steps that came once."""
        self._team = Team(torch.get_num_threads())

    def run(self, residual: Tensor, varying: Varying, cache: int, layers: Layers) -> Pair:
        """Return what `layers` returns for `residual`. cache: address of the KV cache, another one
        is another program.
        """
        key, is_small = (len(residual), cache), len(residual) <= SMALL_TOKENS
        if key not in self._programs:
            if not is_small and key not in self._sizes:
                self._sizes.append(key)
                return layers(residual, do_nothing)
            if len(self._programs) >= MAX_PROGRAMS:
                self._programs.clear()
                self._team.forget()
            return self._record(key, residual, layers)
        program = self._programs[key]
        if program is None:
            return layers(residual, do_nothing)
        if not is_small:
            return program.play(residual, varying, torch.get_num_threads())
        if self._team.size != torch.get_num_threads():  # nobody plays on more than others expect
            self._team = Team(torch.get_num_threads())
        threads = self._team.choose(key)
        began = time.perf_counter()
        result = program.play(residual, varying, threads)
        self._team.took(key, threads, time.perf_counter() - began)
        return result

    def _record(self, key: tuple[int, int], residual: Tensor, layers: Layers) -> Pair:
        first = residual.clone()
        self._arenas = self._arenas or Arenas(self._arena_bytes)
        with Recorder(self._arenas) as recorder:
            last, first = layers(first, self._arenas.turn)
        self._programs[key] = None if recorder.void else Program(recorder.calls, first, last)
        return last, first


def do_nothing() -> None:
    """There is no arena to change."""
