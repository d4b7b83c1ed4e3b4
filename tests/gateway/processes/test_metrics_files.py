"""Checks the files in which workers share their metrics: they have their disk space before it is
full, and give back what they did not use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from gateway.processes.supervisor import cut_metrics
from gateway.telemetry.histograms import FILE_BYTES as HISTOGRAMS_BYTES
from gateway.telemetry.shared_files import FILE_BYTES, KINDS_OF_FILES, gather, reserve_disk
from tests.copied_product import ROOT, run_copy

COUNT = """
import sys; from pathlib import Path
from gateway.telemetry.metrics import Telemetry
shared = Path(sys.argv[1])
telemetry = Telemetry(models=["m"], shared_folder=shared)
telemetry.answered(route="/x", model="m", status="200")
telemetry.ttft_of("m").observe(0.2)
telemetry.open_calls.set(3)
print(telemetry.render().content.decode())
"""

COUNT_IN_THREADS = """
import os, sys, threading; from pathlib import Path
from gateway.telemetry.metrics import Telemetry
telemetry = Telemetry(models=["m"], shared_folder=Path(sys.argv[1]))
counter = telemetry.requests_of("/x", "m", "200")
sys.setswitchinterval(1e-6)
os.getpid = None  # nobody asks the kernel at each change
threads = [threading.Thread(target=lambda: [counter.inc() for _ in range(20_000)]) for _ in "1234"]
[each.start() for each in threads]
[each.join() for each in threads]
print(telemetry.render().content.decode())
"""


def test_no_file_of_metrics_is_sparse(tmp_path: Path) -> None:
    shared = tmp_path / "metrics"
    shared.mkdir()
    told = run_copy(ROOT, ("-c", COUNT, str(shared)), PROMETHEUS_MULTIPROC_DIR=str(shared))
    assert 'tollgate_requests_total{model="m",route="/x",status="200"} 1.0' in told.stdout
    files = list(shared.iterdir())
    assert {each.name.rpartition("_")[0] for each in files} == {*KINDS_OF_FILES, "histograms"}
    assert FILE_BYTES == HISTOGRAMS_BYTES
    for file in files:
        assert file.stat().st_blocks * 512 >= FILE_BYTES == file.stat().st_size
        cut_metrics(file)
        assert file.stat().st_size < FILE_BYTES / 10
    again = run_copy(ROOT, ("-c", COUNT, str(shared)), PROMETHEUS_MULTIPROC_DIR=str(shared))
    assert 'tollgate_requests_total{model="m",route="/x",status="200"} 2.0' in again.stdout
    assert 'tollgate_time_to_first_token_seconds_count{model="m"} 2.0' in again.stdout


def test_a_series_is_one_where_another_version_said_otherwise_what_it_counts(
    tmp_path: Path,
) -> None:
    for pid, help_text in enumerate(("as it was", "as it is")):
        file = MmapedDict(str(tmp_path / f"counter_{pid}.db"))
        file.write_value(mmap_key("m", "m_total", ["lane"], ["batch"], help_text), 2.0 + pid, 0.0)
        file.close()
    (metric,) = gather(tmp_path)
    assert [(each.labels, each.value) for each in metric.samples] == [({"lane": "batch"}, 5.0)]


def test_threads_count_without_a_lock_and_lose_nothing(tmp_path: Path) -> None:
    told = run_copy(
        ROOT, ("-c", COUNT_IN_THREADS, str(tmp_path)), PROMETHEUS_MULTIPROC_DIR=str(tmp_path)
    )
    assert 'tollgate_requests_total{model="m",route="/x",status="200"} 80000.0' in told.stdout


def test_who_reads_while_a_worker_makes_its_files_finds_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one has no length, which was an error of the whole page."""
    looks: list[int] = []
    reserve = os.posix_fallocate

    def read_first(fd: int, offset: int, size: int) -> None:
        looks.append(len([*gather(tmp_path)]))
        reserve(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", read_first)
    reserve_disk(tmp_path)
    assert looks == [0] * len(KINDS_OF_FILES)


def test_the_files_of_a_process_of_the_same_number_are_kept(tmp_path: Path) -> None:
    reserve_disk(tmp_path)
    [counter] = tmp_path.glob("counter_*")
    counter.write_bytes(b"\x08\0\0\0" + b"kept")
    reserve_disk(tmp_path)
    assert counter.read_bytes().startswith(b"\x08\0\0\0kept")
    assert counter.stat().st_size == FILE_BYTES


def test_a_file_that_no_metric_wrote_to_can_be_cut(tmp_path: Path) -> None:
    reserve_disk(tmp_path)
    for file in tmp_path.iterdir():
        assert file.name.endswith(f"_{os.getpid()}.db")
        cut_metrics(file)
        assert file.stat().st_size == 8
