"""The order in which streams are made to wait for each other, on a CUDA that only takes notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from engine.runner.batch.transfers import Transfers
from engine.runner.device import cuda_graphs
from engine.runner.device.cuda_graphs import CudaGraphs
from engine.runner.device.device_buffers import NUM_STAGINGS, StagingBuffer

CUDA = torch.device("cuda")


class Notes:
    """The record of what was asked of which stream, and of the events the host waited for."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.current = "main"
        self.num_streams = self.num_events = 0


def fake_cuda(notes: Notes) -> dict[str, Any]:
    """Return what the runner uses of torch.cuda, by name."""

    class Event:
        def __init__(self) -> None:
            notes.num_events += 1
            self.name = f"event{notes.num_events}"

        def record(self, stream: Any) -> None:
            notes.done.append(f"{stream.name} records {self.name}")

        def synchronize(self) -> None:
            notes.done.append(f"host waits for {self.name}")

    class Stream:
        def __init__(self, device: Any = None, name: str = "") -> None:
            notes.num_streams += not name
            self.name = name or f"side{notes.num_streams}"

        def wait_event(self, event: Event) -> None:
            notes.done.append(f"{self.name} waits for {event.name}")

    class CUDAGraph:
        def capture_begin(self, pool: str, capture_error_mode: str) -> None:
            notes.done.append(f"{notes.current} begins in {pool}")

        def capture_end(self) -> None:
            notes.done.append(f"{notes.current} ends")

        def replay(self) -> None:
            notes.done.append("replay")

    @contextmanager
    def stream(stream: Stream) -> Iterator[None]:
        before, notes.current = notes.current, stream.name
        yield
        notes.current = before

    def current_stream(device: Any) -> Stream:
        return Stream(name=notes.current)

    return {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": CUDAGraph,
        "stream": stream,
        "current_stream": current_stream,
        "synchronize": lambda device: notes.done.append("host waits for all"),
        "graph_pool_handle": lambda: "pool",
        "memory_reserved": lambda device: 100 * len(notes.done),
    }


def pageable(make: Any) -> Any:
    """Without a GPU nothing can be pinned."""
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes = Notes()
    for name, value in fake_cuda(notes).items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, pageable(getattr(torch, name)))
    return notes


def test_a_download_waits_for_its_tensors_alone_and_is_not_overwritten(notes: Notes) -> None:
    transfers, drawn = Transfers(CUDA), torch.tensor([4, 5])
    transfers.let_downloads_pass()
    assert notes.done == []
    download = transfers.download(drawn)
    assert notes.done == ["main records event1", "side1 waits for event1", "side1 records event2"]
    notes.done.clear()
    transfers.let_downloads_pass()
    assert notes.done == ["main waits for event2"]
    drawn.fill_(0)
    notes.done.clear()
    (copy,) = download.wait()
    assert notes.done == ["host waits for event2"]
    assert copy.tolist() == [4, 5]


def test_a_staging_is_written_when_its_copy_has_left(notes: Notes) -> None:
    """Two in rotation: the host waits for a copy only when it comes round again."""
    transfers, device = Transfers(CUDA), torch.zeros(8, dtype=torch.uint8)
    stagings = [StagingBuffer(transfers, 8) for _ in range(NUM_STAGINGS)]
    for number, staging in enumerate(stagings):
        memory: np.ndarray[Any, np.dtype[np.uint8]] = staging.open()
        memory[:] = number + 7
        staging.send(device, 3)
        assert device.tolist() == [number + 7] * 3 + [0] * 5
    assert notes.done == ["main records event1", "main records event2"]
    stagings[0].open()
    assert notes.done[2:] == ["host waits for event1"]


def test_a_graph_is_recorded_on_a_stream_of_its_own(notes: Notes) -> None:
    """After the work was done once, outside; and the collector rests meanwhile."""
    graphs = CudaGraphs(CUDA)
    resting = list[bool]()

    def work() -> None:
        notes.done.append(f"{notes.current} works")
        resting.append(not cuda_graphs.gc.isenabled())

    graph = graphs.record(work)
    recorded = ["side1 begins in pool", "side1 works", "side1 ends"]
    assert notes.done == ["main works", "host waits for all", *recorded]
    assert resting == [False, True] and cuda_graphs.gc.isenabled()
    assert graphs.num_bytes() == 300
    graph()
    assert notes.done[-1] == "replay"


def test_what_fails_while_it_is_recorded_ends_the_recording(notes: Notes) -> None:
    graphs, times = CudaGraphs(CUDA), list[int]()

    def work() -> None:
        times.append(1)
        if len(times) == 2:
            raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        graphs.record(work)
    assert notes.done[-1] == "side1 ends" and cuda_graphs.gc.isenabled()
