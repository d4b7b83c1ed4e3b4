"""Poisoned definitions are flagged, and ordinary ones are not: the rates are printed."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from mcp_bridge.trust.scan import scan, worst
from tests.mcp_bridge.trust.poisoning import FOLDER, PARTS, Part, Sample, attacks, ordinary

LEAST_RECALL, MOST_FALSE = 0.8, 0.05
LEAST_RECALL_FIRST = 0.75
"""Bounds the recall of the first part that was held out, of 48 attacks."""
FROZEN: dict[Part, str] = {
    "second_held_out_": "57b4016c33a49f8687ba94fc6c927d1c38bb9f8167076783d72490b03879c3b0",
    "third_held_out_": "2e9467d4bcfbd361b050ea5d6c025d59a1de9b3f7d6f91f560f2361a78f4ba1d",
}
"""Fixes the parts that were held out: the SHA-256 of the two files of each."""


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
        known, first, second, third = (
            rates(attacks(part), ordinary(part), part.replace("_", " ") or "rules made with these")
            for part in PARTS
        )
        bad = [each for part in FROZEN for each in attacks(part)]
        good = [each for part in FROZEN for each in ordinary(part)]
        frozen = rates(bad, good, "second and third held out")
        every_bad = [each for part in PARTS for each in attacks(part)]
        every_good = [each for part in PARTS for each in ordinary(part)]
        together = rates(every_bad, every_good, "all")
    assert len(good) >= 200 and len({sample.kind for sample in bad}) >= 12
    assert min(one[0] for one in (known, second, third, frozen, together)) >= LEAST_RECALL
    assert first[0] >= LEAST_RECALL_FIRST
    assert max(one[1] for one in (known, first, third, frozen, together)) <= MOST_FALSE


def test_no_definition_is_in_two_parts() -> None:
    samples = [each for part in PARTS for each in attacks(part) + ordinary(part)]
    assert len({str(sample.tool["name"]) for sample in samples}) == len(samples)


@pytest.mark.parametrize("part", FROZEN)
def test_a_part_that_was_held_out_is_as_it_was_written(part: Part) -> None:
    said = b"".join((FOLDER / f"{part}{name}.jsonl").read_bytes() for name in ("attacks", "benign"))
    assert hashlib.sha256(said).hexdigest() == FROZEN[part]
    assert len(attacks(part)) >= 80 and len(ordinary(part)) >= 100
