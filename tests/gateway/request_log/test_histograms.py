"""Histograms add up, and a quantile is as near as they say."""

from __future__ import annotations

import json
import math

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.request_log.histograms import (
    DIGITS,
    MAX_ERROR,
    middle_us,
    pack,
    quantile_us,
    share_within,
    unit_sql,
    unpack,
)
from gateway.telemetry.latency_counts import BOUNDS_US, NUM_BUCKETS

LATENCIES = st.integers(BOUNDS_US[0], BOUNDS_US[-1] - 1)


def bucket_of(latency_us: int) -> int:
    return sum(bound <= latency_us for bound in BOUNDS_US)


def packed(latencies: list[int]) -> str:
    return str(sum(10 ** (DIGITS * bucket_of(each)) for each in latencies))


@given(st.lists(LATENCIES, min_size=1), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_as_near_as_is_said(latencies: list[int], share: float) -> None:
    found = quantile_us(unpack(packed(latencies)), share)
    exact = sorted(latencies)[math.ceil(share * len(latencies)) - 1]
    assert found is not None
    assert abs(found / exact - 1) <= MAX_ERROR + 0.002  # the bounds are whole microseconds


def test_what_is_out_of_bounds_is_counted_at_the_ends() -> None:
    counts = unpack(packed([0, 10**12]))
    assert counts[0] == counts[-1] == 1 and sum(counts) == 2
    assert quantile_us(counts, 0.5) == middle_us(0) and quantile_us(counts, 1) == BOUNDS_US[-1]


def test_without_requests_there_is_no_quantile_and_no_share() -> None:
    assert quantile_us(unpack("0"), 0.5) is None
    assert share_within([0] * NUM_BUCKETS, 1) is None


def test_the_share_within_a_bound() -> None:
    counts = unpack(packed([1_000, 2_000, 400_000, 10**12]))
    assert share_within(counts, 500_000) == 0.75


@pytest.mark.parametrize("latency", [None, 0, BOUNDS_US[0], 123_456, BOUNDS_US[-1], 10**15])
async def test_postgres_makes_them_alike(db: AsyncEngine, latency: int | None) -> None:
    async with db.connect() as conn:
        query = f"SELECT ({unit_sql('n')})::text FROM (SELECT CAST(:n AS bigint) AS n) AS s"
        found = await conn.scalar(sa.text(query), {"n": latency})
    assert found == packed([] if latency is None else [latency])


@given(st.dictionaries(st.integers(0, NUM_BUCKETS - 1), st.integers(0, 10**DIGITS - 1)))
def test_counts_are_packed_as_they_are_read(filled: dict[int, int]) -> None:
    counts = [filled.get(number, 0) for number in range(NUM_BUCKETS)]
    digits, _, exponent = pack(counts).partition("e")
    assert unpack(str(int(digits) * 10 ** int(exponent or 0))) == counts


async def test_postgres_reads_packed_counts(db: AsyncEngine) -> None:
    counts = [0] * NUM_BUCKETS
    counts[3], counts[50], counts[-1] = 2, 10**DIGITS - 1, 7
    async with db.connect() as conn:
        found = await conn.scalar(
            sa.text(
                "SELECT (r.n + 0)::text FROM json_to_record(CAST(:j AS json)) AS r (n numeric)"
            ),
            {"j": json.dumps({"n": pack(counts)})},
        )
    assert unpack(str(found)) == counts


async def test_postgres_adds_millions_without_mixing_buckets(db: AsyncEngine) -> None:
    async with db.connect() as conn:
        query = sa.text(
            f"SELECT sum(({unit_sql('n')}) * 3000000)::text FROM unnest(ARRAY[600, 700000]) AS n"
        )
        counts = unpack(str(await conn.scalar(query)))
    assert sorted(counts)[-2:] == [3_000_000, 3_000_000] and sum(counts) == 6_000_000
