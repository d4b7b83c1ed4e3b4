"""Histograms of several workers add up to what they observed, in buckets of both kinds."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.processes.supervisor import cut_metrics
from gateway.telemetry.exposition import Measurements, to_text
from gateway.telemetry.histograms import (
    BUCKETS_PER_DOUBLING,
    FIRST_INDEX,
    MOST_EXPONENT,
    NUM_NATIVE,
    USED,
    ZERO_THRESHOLD,
    Exemplar,
    Histogram,
    HistogramFamily,
    HistogramMemory,
    HistogramSeries,
    contents_of,
    records_of,
)
from tests.budget import examples

BOUNDS = (0.005, 0.1, 1.0)
SECONDS = st.floats(0, 2.0**MOST_EXPONENT)
TRACE, OTHER = "4bf92f3577b34da6a3ce929d0e0e4736", "0" * 31 + "1"


def made(path: Path | None = None, *, size: int = 1 << 16) -> Histogram:
    return Histogram(HistogramMemory(path, size), "latency", "Of it.", ("model",), BOUNDS)


def family_of(histogram: Histogram, contents: Iterable[bytes]) -> HistogramFamily:
    return histogram.family(records_of(contents).get(histogram.name, ()))


def only(histogram: Histogram, contents: list[bytes]) -> HistogramSeries:
    [series] = family_of(histogram, contents).series
    return series


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), SECONDS), max_size=30))
def test_what_workers_observe_is_written_as_prometheus_client_writes_it(
    observed: list[tuple[str, int, float]],
) -> None:
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram(
        "latency", "Of it.", ["model"], buckets=BOUNDS, registry=registry
    )
    workers = [made() for _ in range(3)]
    for model, worker, value in observed:
        theirs.labels(model).observe(value)
        workers[worker].labels(model).observe(value)
    family = family_of(workers[0], [each._memory.content() for each in workers])
    ours = to_text(Measurements([], [family])).decode().splitlines()
    expected = prometheus_client.generate_latest(registry).decode().splitlines()
    expected = [each for each in expected if "_created" not in each]
    assert {*map(rounded, ours)} == {*map(rounded, expected)} and len(ours) == len(expected)


def rounded(line: str) -> str:
    """A sum of floats depends on their order."""
    name, _, value = line.rpartition(" ")
    return f"{name} {float(value):.6g}" if "_sum" in name else line


@settings(max_examples=examples(300))
@given(SECONDS)
def test_a_native_bucket_holds_what_lies_between_its_bounds(value: float) -> None:
    histogram = made()
    histogram.labels("m").observe(value)
    natives = only(histogram, [histogram._memory.content()]).natives
    assert sum(natives) == 1 and len(natives) == NUM_NATIVE
    place = natives.index(1)
    if place == 0:
        assert value <= ZERO_THRESHOLD
    else:
        index = place - 1 + FIRST_INDEX
        base = 2 ** (1 / BUCKETS_PER_DOUBLING)
        assert base ** (index - 1) * 0.999999 < value <= base**index * 1.000001


def test_what_is_beyond_all_buckets_is_in_the_last() -> None:
    histogram = made()
    histogram.labels("m").observe(1e9)
    series = only(histogram, [histogram._memory.content()])
    assert series.natives[-1] == 1 and series.counts == [0, 0, 0, 1] and series.total == 1e9


def test_the_newest_exemplar_of_a_bucket_stays() -> None:
    one, two = made(), made()
    for histogram, trace, at in ((one, TRACE, 5.0), (two, OTHER, 9.0)):
        histogram.labels("m").observe(0.2)
        histogram.labels("m").exemplify(0.2, trace=trace, at=at)
    contents = [each._memory.content() for each in (two, one)]
    exemplars = only(one, contents).exemplars
    assert exemplars == [None, None, Exemplar(0.2, 9.0, OTHER), None]
    assert bisect_left(BOUNDS, 0.2) == 2


def test_an_exemplar_that_is_just_being_written_is_left_out() -> None:
    histogram = made()
    child = histogram.labels("m")
    child.exemplify(0.2, trace=TRACE, at=5.0)
    content = histogram._memory.content()
    torn = content.replace(bytes.fromhex(TRACE), bytes.fromhex(OTHER))
    assert torn != content and only(histogram, [torn]).exemplars == [None] * 4


def test_a_process_of_the_same_number_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "histograms_7.shm"
    first = made(path)
    first.labels("m").observe(0.2)
    assert path.stat().st_size == 1 << 16
    del first
    cut_metrics(path)
    assert path.stat().st_size < 4096
    assert only(made(), [*contents_of(tmp_path)]).counts == [0, 0, 1, 0], "it is gone, and counts"
    again = made(path)
    again.labels("m").observe(0.01)
    again.labels("n").observe(0.01)
    family = family_of(again, contents_of(tmp_path))
    assert [(each.labels, each.counts) for each in family.series] == [
        (("m",), [0, 1, 1, 0]),
        (("n",), [0, 1, 0, 0]),
    ]


def test_what_another_version_laid_out_is_left_out(tmp_path: Path) -> None:
    other = Histogram(
        HistogramMemory(tmp_path / "histograms_1.shm", 1 << 16), "latency", "", ("model",), (1.0,)
    )
    other.labels("m").observe(0.2)
    longer = Histogram(other._memory, "latency_of_another", "", ("model",), BOUNDS)
    longer.labels("m").observe(0.2)
    assert family_of(made(), contents_of(tmp_path)).series == []


def test_labels_without_room_are_counted_together() -> None:
    histogram = made(size=1 << 14)
    for number in range(100):
        histogram.labels("-" if not number else f"model-{number}").observe(0.2)
    family = family_of(histogram, [histogram._memory.content()])
    assert 2 < len(family.series) < 10
    assert sum(each.count for each in family.series) == 100
    assert family.series[0].labels == ("-",)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, struct.pack("<IIII", 1, 1, 1, 1) + b"x"])
def test_a_damaged_file_ends_where_it_makes_no_sense(tmp_path: Path, damage: bytes) -> None:
    content = USED.pack(USED.size + len(damage)) + damage
    (tmp_path / "histograms_1.shm").write_bytes(content)
    assert family_of(made(), contents_of(tmp_path)).series == []
