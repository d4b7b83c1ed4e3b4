"""Keeps counters and gauges in files that workers map, in prometheus-client's format, and adds them
up.

prometheus-client's own values take a lock and ask the kernel for the process's number at every
change, some twenty times a request. Its `MultiProcessCollector` parses each key of each file at
every scrape; with a hundred models that is a fifth of a second. Here a key is parsed once.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

from prometheus_client import values
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.samples import Sample

FILE_BYTES = 4 * 1024 * 1024
"""Room for some 30,000 series of a kind."""
KINDS_OF_FILES = (
    "counter",
    *("gauge_livesum", "gauge_livemin", "gauge_livemax", "gauge_mostrecent"),
)
"""The kinds that prometheus-client keeps in a file each."""
MAX_KEYS = 65_536
"""How many series are remembered by their keys."""

NUMBER = struct.Struct("dd")
"""A value, and when a gauge of the mode "mostrecent" was set, in Unix seconds."""

SeriesId = tuple[str, str, tuple[tuple[str, str], ...]]
"""The name of a metric and of its series, and the labels."""


class SharedValue:
    """The number of one series, as prometheus-client's metrics ask for it (`values.ValueClass`).

    It takes no lock: CPython changes no thread between reading an attribute and calling `pack_into`
    with it, so the file has the last number. It is of the process that made it: workers are
    started, never forked.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        metric: str,
        name: str,
        label_names: tuple[str, ...],
        labels: tuple[str, ...],
        help_text: str,
        multiprocess_mode: str = "",
        **_: Any,
    ) -> None:
        prefix = f"{kind}_{multiprocess_mode}" if kind == "gauge" else kind
        file = shared_file(folder / f"{prefix}_{os.getpid()}.db")
        key = mmap_key(metric, name, [*label_names], [*labels], help_text)
        self._value: float = file.read_value(key)[0]
        # A file that grows is mapped anew; what was mapped before shows the same pages.
        self._map, self._place = file._m, file._positions[key]

    def inc(self, amount: float) -> None:
        self._value += amount
        NUMBER.pack_into(self._map, self._place, self._value, 0.0)

    def set(self, value: float, timestamp: float | None = None) -> None:
        self._value = value
        NUMBER.pack_into(self._map, self._place, self._value, timestamp or 0.0)

    def get(self) -> float:
        return self._value

    def set_exemplar(self, exemplar: Any) -> None:
        """Keep none: histograms have them (`gateway.telemetry.histograms`)."""

    def get_exemplar(self) -> None:
        return None


@cache
def shared_file(path: Path) -> MmapedDict:
    return MmapedDict(str(path))


def share_values(folder: Path) -> None:
    """Let the metrics that are made from now on keep their numbers in files there, where this
    process shares them at all (PROMETHEUS_MULTIPROC_DIR, as prometheus-client reads it)."""
    if values.ValueClass is not values.MutexValue:
        values.ValueClass = partial(SharedValue, folder)


def reserve_disk(shared_folder: Path) -> None:
    """Make this process's files of metrics, with disk space for all that they will hold.

    prometheus-client maps sparse files. A write to such a mapping on a full disk kills the process
    (SIGBUS), when a page is touched for the first time. A file gets its name once it has its size:
    an empty one fails whoever reads those of all workers. Raises: OSError.
    """
    for name in KINDS_OF_FILES:
        reserve(shared_folder / f"{name}_{os.getpid()}.db", FILE_BYTES)


def reserve(path: Path, size: int) -> None:
    """Make a file of that size, or a smaller one as large. Raises: OSError."""
    is_new = not path.exists()  # else of an earlier process of the same number: it goes on
    reserved = path.with_suffix(".new") if is_new else path
    fd = os.open(reserved, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)
    if is_new:
        reserved.rename(path)


def gather(shared_folder: Path) -> Iterator[Metric]:
    """Yield the counters and gauges of all workers. A counter keeps what processes counted that are
    gone, also of another version of the program, which may say otherwise what it counts; of a gauge
    each mode says how the values of those that live become one."""
    numbers: dict[SeriesId, tuple[str, float, float]] = {}
    """Kind, value and timestamp."""
    texts: dict[str, str] = {}
    for path in sorted(shared_folder.glob("*.db")):
        kind, _, mode = path.stem.rpartition("_")[0].partition("_")
        try:
            found = [*MmapedDict.read_all_values_from_file(str(path))]
        except FileNotFoundError:
            continue  # of a gauge whose process has just ended
        for key, value, timestamp, _ in found:
            series, texts[series[0]] = _parsed(key)
            known, one = numbers.get(series), (kind, value, timestamp)
            numbers[series] = one if known is None else _joined(mode, known, one)
    metrics: dict[str, Metric] = {}
    for (name, sample, labels), (kind, value, _) in numbers.items():
        if name not in metrics:
            metrics[name] = Metric(name, texts[name], kind)
        metrics[name].samples.append(Sample(sample, dict(labels), value))
    yield from metrics.values()


def _joined(
    mode: str, known: tuple[str, float, float], other: tuple[str, float, float]
) -> tuple[str, float, float]:
    """Join two values with their timestamps. `mode`: of a gauge; of a counter, empty."""
    if mode == "mostrecent":
        return known if known[2] >= other[2] else other
    kind, value, timestamp = known
    if mode == "livemin":
        return kind, min(value, other[1]), timestamp
    if mode == "livemax":
        return kind, max(value, other[1]), timestamp
    return kind, value + other[1], timestamp


@lru_cache(MAX_KEYS)
def _parsed(key: str) -> tuple[SeriesId, str]:
    """Return which series it is, and the help text."""
    metric, sample, labels, help_text = json.loads(key)
    return (metric, sample, tuple(labels.items())), help_text
