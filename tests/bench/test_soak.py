"""A soak finds fault with what grows or is left behind."""

from __future__ import annotations

from bench.soak import MAX_GROWTH_BYTES, REDIS, WORKER, Sample, Span, grown, growth, left_behind
from bench.tools.soak_load import kinds

MIB = 2**20
WHOLE = Span(1500)
IDLE = {"worker's files": 30, "engine's files": 9, "tasks": 20, "leases": 0, "KV blocks": 0}


def samples(**rates: float) -> list[Sample]:
    """Each process starts with 100 MiB and grows by so many MiB a minute, for twenty-five."""
    moments = [5.0 * number for number in range(301)]
    return [
        Sample(at_s, {name: int((100 + rate * at_s / 60) * MIB) for name, rate in rates.items()})
        for at_s in moments
    ]


def test_what_grows_by_two_percent_after_the_warm_up_is_named() -> None:
    found = growth(samples(worker=0.5, engine=0.1), WHOLE)
    assert [line.split()[0] for line in grown(found, WHOLE)] == ["worker"]
    before, after = found["worker"]
    assert abs(before - (100 + 0.5 * 6.25) * MIB) < MIB / 10, "the median of minutes 5 to 7.5"
    assert abs(after - (100 + 0.5 * 23.75) * MIB) < MIB / 10


def test_a_worker_is_judged_once_it_has_compared_the_books() -> None:
    stepped = [Sample(s.at_s, {WORKER: (100 + 9 * (s.at_s > 600)) * MIB}) for s in samples(x=0)]
    assert grown(growth(stepped, WHOLE), WHOLE) != []
    compared = Span(1500, compared_s=605)
    assert grown(growth(stepped, compared), compared) == []
    assert grown(growth(samples(worker=1), compared), compared) != []


def test_a_little_of_a_small_process_is_noise() -> None:
    assert grown({"redis": (MIB, MIB + MAX_GROWTH_BYTES)}, WHOLE) == []
    assert grown({"redis": (MIB, MIB + MAX_GROWTH_BYTES + 1)}, WHOLE) != []


def test_redis_is_judged_once_it_forgets_as_much_as_it_learns() -> None:
    filling = [Sample(s.at_s, {REDIS: min(s.memory[REDIS], 118 * MIB)}) for s in samples(redis=1.0)]
    assert grown(growth(filling, WHOLE), WHOLE) == []
    assert grown({REDIS: (MIB, 9 * MIB)}, Span(600)) == [], "a short run cannot tell"
    assert grown(growth(samples(redis=2.0), WHOLE), WHOLE) != []


def test_what_is_held_though_nobody_asks_is_named() -> None:
    assert left_behind(IDLE, IDLE) == []
    assert left_behind(IDLE, IDLE | {"leases": 1}) == ["leases: 1, at most 0"]
    assert left_behind(IDLE, IDLE | {"tasks": 21}) == ["tasks: 21, at most 20"]
    assert left_behind(IDLE, IDLE | {"worker's files": 39}) == ["worker's files: 39, at most 38"]


def test_the_mix_is_of_a_hundred_and_whole_http() -> None:
    mix = kinds("http://127.0.0.1:1/v1", "key", "limited")
    assert sum(kind.weight for kind in mix) == 100
    for kind in mix:
        head, _, body = kind.request.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert b"\r\ncontent-length: %d" % len(body) in head
