"""Poisoned definitions are flagged, and ordinary ones are not: the rates are printed."""

from __future__ import annotations

from collections import Counter

import pytest

from mcp_bridge.trust.scan import scan, worst
from tests.mcp_bridge.trust.poisoning import Sample, attacks, ordinary

LEAST_RECALL, MOST_FALSE = 0.8, 0.05
LEAST_RECALL_HELD_OUT = 0.6
"""Bounds the recall of attacks that were written after the rules."""


def is_flagged(sample: Sample) -> bool:
    return worst(scan("tool", sample.tool)) in ("medium", "high")


def rates(bad: list[Sample], good: list[Sample], what: str) -> tuple[float, float]:
    found = [sample for sample in bad if is_flagged(sample)]
    false = [str(sample.tool["name"]) for sample in good if is_flagged(sample)]
    recall, alarms = len(found) / len(bad), len(false) / len(good)
    print(f"{what}: recall {recall:.1%} of {len(bad)}, false alarms {alarms:.1%} of {len(good)}")
    missed = Counter(sample.kind for sample in bad) - Counter(sample.kind for sample in found)
    print(f"  missed: {dict(missed)}; accused: {false}")
    return recall, alarms


def test_most_attacks_are_flagged_and_few_others(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        known = rates(attacks(), ordinary(), "rules written with these")
        held_out = rates(attacks(held_out=True), ordinary(held_out=True), "held out")
        bad, good = attacks() + attacks(held_out=True), ordinary() + ordinary(held_out=True)
        recall, alarms = rates(bad, good, "all")
    assert len(bad) >= 80 and len(good) >= 200
    assert len({sample.kind for sample in bad}) >= 10
    assert recall >= LEAST_RECALL and alarms <= MOST_FALSE
    assert known[0] >= LEAST_RECALL and known[1] <= MOST_FALSE
    assert held_out[0] >= LEAST_RECALL_HELD_OUT and held_out[1] <= MOST_FALSE


def test_no_definition_is_in_both_parts() -> None:
    names = [sample.tool["name"] for part in (attacks, ordinary) for sample in part()]
    names += [s.tool["name"] for part in (attacks, ordinary) for s in part(held_out=True)]
    assert len(set(names)) == len(names)
