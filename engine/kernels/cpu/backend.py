"""Whether the processor's own kernels run here, and how one is started.

Knows no operation.

Kernels run on the threads that torch's operators run on: libgomp is asked for a team exactly as
torch asks for one. A pool of their own would compete with torch's, whose threads spin for work.
Their machine code is on disk from a first start on (`compiling/`).
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.kernels.backend import interpreted
from engine.kernels.cpu.compiling.compilers import compiled
from engine.kernels.cpu.compiling.kernel_cache import part_of

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
LANES = 16
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""mallopt(3)"""
KEPT_BYTES = 32 << 20
"""The most that mallopt allows."""


def uses_cpu_kernels(device: torch.device) -> bool:
    """On a CPU with numba, and libgomp under torch; not while Triton's interpreter is on, which
    is there to try the other kernels."""
    return device.type == "cpu" and not interpreted() and _team() is not None


def serves(x: Tensor) -> bool:
    """Whether a row-wise kernel can take `x`."""
    return (
        x.is_cpu
        and x.dtype in DTYPES
        and x.is_contiguous()
        and x.shape[-1] % LANES == 0
        and uses_cpu_kernels(x.device)
    )


def half(dtype: torch.dtype) -> int:
    """How kernels are told the dtype."""
    return int(dtype == torch.bfloat16)


def float_bits(value: float) -> int:
    """A float32 as the integer that a kernel takes it from."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


class Call(NamedTuple):
    kernel: int
    arguments: tuple[int, ...]
    varies: str
    """Names those calls whose arguments differ from step to step in the same way."""


class KernelRecorder(Protocol):
    def started(self, call: Call) -> None:
        """A kernel runs."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for what a kernel makes."""


class _Thread(threading.local):
    recording: KernelRecorder | None = None


_thread = _Thread()


def record(recording: KernelRecorder | None) -> None:
    """Tell `recording` of every kernel that this thread starts, until None is given."""
    _thread.recording = recording


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """For what a kernel makes."""
    if (recording := _thread.recording) is not None:
        return recording.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype)


def start(kernel: int, arguments: tuple[int, ...], threads: int, varies: str = "") -> None:
    """Run the kernel at this address on so many threads of torch's pool, and wait. Where threads
    draw their work from a counter, that is the first of `arguments`, and 0."""
    if (recording := _thread.recording) is not None:
        recording.started(Call(kernel, arguments, varies))
    team = _team()
    assert team is not None, "no kernel without numba"
    team(kernel, (ctypes.c_int64 * len(arguments))(*arguments), threads, 0)


@cache
def barrier() -> int:
    """The address of a function that returns when all threads of a team have called it."""
    return int(ctypes.cast(ctypes.CDLL(None).GOMP_barrier, ctypes.c_void_p).value or 0)


@cache
def kernel(module: str, name: str) -> int:
    """The address of a kernel of the folder `cpu`, loaded now, and compiled before if nobody has.
    Raises RuntimeError when it cannot be."""
    import numba

    folder = compiled(part_of(module))
    numba.config.CACHE_DIR = str(folder)
    found = getattr(importlib.import_module(f"engine.kernels.cpu.{module}"), name)
    if not found.cache_hits:  # compiled here: see `compilers`
        raise RuntimeError(f"the kernel {module}.{name} is not loaded from {folder}")
    return int(found.address)


@cache
def _team() -> Any:
    """libgomp's GOMP_parallel(function, argument, threads, flags); None where there is none, or no
    numba."""
    try:
        import numba  # noqa: F401
    except ImportError as error:  # not installed, or for another numpy
        logger.warning("torch's operators serve on this processor, several times slower: %s", error)
        return None
    try:
        # The instance that torch brought: its symbols are global.
        team = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return None
    _keep_memory()
    team.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    team.restype = None
    return team


def _keep_memory() -> None:
    """Let the C library (glibc) keep what is freed: a step's tensors, fetched from the system anew,
    cost a page fault for every 4 KiB, as long as the kernel that fills them takes."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
