"""Parts of tensors from files to their final place, at the disk's speed and without a whole copy.

Knows no names.

A tensor is cut into chunks that several threads read at once. Where the place is host memory and
the dtype stays, a chunk is read straight into it. Otherwise it is read into a staging buffer and
converted from there; for a CUDA device the buffers are pinned, the copies run on a stream of their
own, and the conversion happens on the device. So the host memory beyond the model is that of the
staging buffers: STAGING_PER_THREAD * CHUNK_BYTES for each thread. The files are read, not mapped: a
mapped file's pages count as this process's memory, cost a fault each, and kill the process with
SIGBUS if the file is cut while it loads.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.parallel import WHOLE, Shard

CHUNK_BYTES = 8 * 1024 * 1024
MAX_THREADS = 8
STAGING_PER_THREAD = 2
"""One is read into while the other's copy is under way."""


class Source(NamedTuple):
    """A tensor in a file: contiguous, little-endian."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Run(NamedTuple):
    """`num_rows` rows of `row` elements, one behind the other in the file, of which the columns
    [start, stop) are wanted: in the place they are rows, too, and begin at `place`."""

    offset: int
    num_rows: int
    row: int
    start: int
    stop: int
    place: int
    """Elements from the start of the (flat) place."""


class _ChunkBuffer:
    """A buffer that one chunk at a time passes through."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.copied: torch.cuda.Event | None = torch.cuda.Event() if pinned else None


class TensorReader:
    """Reads for one device. A context manager: what it holds is given back at its end."""

    def __init__(self, device: torch.device, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.device = device
        self.bytes_read = 0
        self._chunk_bytes = chunk_bytes
        self._files: dict[Path, int] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="weights")
        self._staging: queue.SimpleQueue[_ChunkBuffer | None] = queue.SimpleQueue()
        """Free buffers; None stands for one that was never needed yet."""
        for _ in range(num_threads * STAGING_PER_THREAD):
            self._staging.put(None)
        self._lock = threading.Lock()
        self._read_s = 0.0
        self._convert_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        if self._stream is not None:
            self._stream.synchronize()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    @property
    def convert_share(self) -> float:
        """Return the share of the threads' time so far that went into converting and copying; 0 to
        1.
        """
        whole = self._read_s + self._convert_s
        return self._convert_s / whole if whole else 0.0

    def read(self, source: Source, shard: Shard = WHOLE, *, dtype: torch.dtype) -> Tensor:
        """A new tensor of `dtype` on the device: the part `shard` of it.

        On a CUDA device it is filled once the current stream comes to it. Raises ConfigError when
        the file cannot be read to its end.
        """
        shape = list(source.shape)
        if shard.parts > 1:
            shape[shard.dim] //= shard.parts
        place = torch.empty(shape, dtype=dtype, device=self.device)
        runs = list(_runs(source, shard, self._chunk_bytes))
        descriptor = self._open(source.path)
        flat = place.view(-1)
        if self._stream is not None:  # the memory may have been another tensor's a moment ago
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        move = self._chunk_mover(source, flat)
        try:
            if len(runs) == 1:  # no thread is faster than this one for a norm's weight
                move(descriptor, runs[0])
            else:
                list(self._threads.map(lambda run: move(descriptor, run), runs))
        except OSError as error:
            raise ConfigError(f"{source.path} cannot be read: {error.strerror}") from error
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return place

    def _open(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
            os.posix_fadvise(self._files[path], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._files[path]

    def _chunk_mover(self, source: Source, flat: Tensor) -> Callable[[int, _Run], None]:
        """How a run of `source` gets into the place `flat`."""
        item = source.dtype.itemsize
        straight = flat.device.type == "cpu" and flat.dtype == source.dtype

        def move(descriptor: int, run: _Run) -> None:
            num_elements = run.num_rows * run.row
            width = run.stop - run.start
            target = flat[run.place : run.place + run.num_rows * width]
            if straight and width == run.row:
                self._fill(target, descriptor, run.offset, source.path)
                return
            staging = self._take_staging(num_elements * item)
            try:
                staged = staging.bytes[: num_elements * item]
                self._fill(staged, descriptor, run.offset, source.path)
                rows = staged.view(source.dtype).view(run.num_rows, run.row)
                self._place(rows, run, target.view(run.num_rows, width), staging)
            finally:
                self._staging.put(staging)

        return move

    def _fill(self, target: Tensor, descriptor: int, offset: int, path: Path) -> None:
        """Read into the contiguous host tensor `target` until it is full."""
        began = time.perf_counter()
        room = target.view(torch.uint8).numpy().data
        done = 0
        while done < len(room):
            count = os.preadv(descriptor, [room[done:]], offset + done)
            if count == 0:
                raise ConfigError(f"{path} ended while it was read")
            done += count
        with self._lock:
            self._read_s += time.perf_counter() - began
            self.bytes_read += done

    def _place(self, rows: Tensor, run: _Run, target: Tensor, staging: _ChunkBuffer) -> None:
        began = time.perf_counter()
        if self._stream is None:
            target.copy_(rows[:, run.start : run.stop])
        else:
            with torch.cuda.stream(self._stream):
                if rows.shape == target.shape and rows.dtype == target.dtype:
                    target.copy_(rows, non_blocking=True)
                else:  # as it is: cut or converted on the way, it would wait in pageable memory
                    arrived = rows.to(self.device, non_blocking=True)
                    target.copy_(arrived[:, run.start : run.stop])
                assert staging.copied is not None
                staging.copied.record(self._stream)
        with self._lock:
            self._convert_s += time.perf_counter() - began

    def _take_staging(self, num_bytes: int) -> _ChunkBuffer:
        staging = self._staging.get()
        if staging is not None and staging.copied is not None:
            staging.copied.synchronize()
        if staging is None or len(staging.bytes) < num_bytes:
            size = max(num_bytes, self._chunk_bytes)
            staging = _ChunkBuffer(size, pinned=self._stream is not None)
        return staging


def _runs(source: Source, shard: Shard, chunk_bytes: int) -> Iterator[_Run]:
    """Return what to read for the part `shard`: chunks of at most `chunk_bytes`."""
    index, count, dim = shard
    if _product(source.shape) == 0:
        return
    item = source.dtype.itemsize
    per_chunk = max(1, chunk_bytes // item)
    inner = _product(source.shape[dim + 1 :])
    if count == 1:
        num_rows, row, start, stop = 1, _product(source.shape), 0, _product(source.shape)
    else:
        width = source.shape[dim] // count * inner
        num_rows, row = _product(source.shape[:dim]), source.shape[dim] * inner
        start, stop = index * width, (index + 1) * width
    if num_rows == 1 or row > per_chunk:  # what is wanted of each row is long enough by itself
        for number in range(num_rows):
            for at in range(start, stop, per_chunk):
                length = min(per_chunk, stop - at)
                place = number * (stop - start) + at - start
                offset = source.offset + (number * row + at) * item
                yield _Run(offset, 1, length, 0, length, place)
        return
    step = per_chunk // row
    for first in range(0, num_rows, step):
        rows = min(step, num_rows - first)
        offset = source.offset + first * row * item
        yield _Run(offset, rows, row, start, stop, first * (stop - start))


def _product(sizes: tuple[int, ...]) -> int:
    return torch.Size(sizes).numel()
