"""Poisoned definitions are flagged, and ordinary ones are not: the rates are printed."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from mcp_bridge.trust.scan import scan, worst
from tests.mcp_bridge.trust.poisoning import FOLDER, PARTS, Sample, attacks, ordinary

LEAST_RECALL, MOST_FALSE = 0.8, 0.05
LEAST_RECALL_HELD_OUT = 0.6
"""Bounds the recall of attacks that were written after the rules."""

FROZEN = "57b4016c33a49f8687ba94fc6c927d1c38bb9f8167076783d72490b03879c3b0"
"""Fixes the second part that was held out: the SHA-256 of its two files."""


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
        known = rates(attacks(""), ordinary(""), "rules written with these")
        held_out = rates(attacks("held_out_"), ordinary("held_out_"), "held out")
        bad, good = attacks("") + attacks("held_out_"), ordinary("") + ordinary("held_out_")
        recall, alarms = rates(bad, good, "all")
    assert len(bad) >= 80 and len(good) >= 200
    assert len({sample.kind for sample in bad}) >= 10
    assert recall >= LEAST_RECALL and alarms <= MOST_FALSE
    assert known[0] >= LEAST_RECALL and known[1] <= MOST_FALSE
    assert held_out[0] >= LEAST_RECALL_HELD_OUT and held_out[1] <= MOST_FALSE


def test_no_definition_is_in_two_parts() -> None:
    samples = [each for part in PARTS for each in attacks(part) + ordinary(part)]
    assert len({str(sample.tool["name"]) for sample in samples}) == len(samples)


def test_the_second_part_that_was_held_out_is_as_it_was_written() -> None:
    said = b"".join(
        (FOLDER / f"second_held_out_{name}.jsonl").read_bytes() for name in ("attacks", "benign")
    )
    assert hashlib.sha256(said).hexdigest() == FROZEN
    assert len(attacks("second_held_out_")) >= 80 and len(ordinary("second_held_out_")) >= 100
