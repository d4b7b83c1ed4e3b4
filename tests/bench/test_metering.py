"""The benchmark of metering really runs, small, and its invoice is exact."""

from __future__ import annotations

import re

import pytest

from bench.metering import TARGETS, verdict
from tests.bench.test_smoke import run

pytestmark = pytest.mark.slow


@pytest.mark.nightly
def test_a_small_one() -> None:
    small = ("--events", "200", "--closes", "200", "--invoice-events", "9000", "--late-events", "9")
    said = run("bench.metering", *small, "--whole")
    for name in TARGETS:
        assert re.search(rf"^{name} +[0-9.,]+   at (least|most) [0-9,]+: ", said, re.MULTILINE), (
            said
        )
    assert re.search(r"^invoice_events +16,137\.00$", said, re.MULTILINE), said


def test_a_target_is_met_or_not() -> None:
    assert verdict("closes_per_s", 10_000).endswith("at least 10,000: met")
    assert verdict("closes_per_s", 9_999.9).endswith("NOT met")
    assert verdict("usage_query_ms", 50).endswith("at most 50: met")
    assert verdict("usage_query_ms", 50.1).endswith("NOT met")
    assert verdict("p50_ms", 1) == ""
