"""The documented alarms ask for metrics that there are, with their labels and states."""

from __future__ import annotations

import re
from typing import get_args

import yaml

from gateway.health.component import State
from gateway.telemetry.metrics import Telemetry
from tests.docs.runner import blocks_of
from tests.stack import ROOT

PAGE = ROOT / "docs" / "how-to" / "monitoring.md"
METRIC = re.compile(r"(tollgate_[a-z_]+)(?:\{([^}]*)\})?")


def known() -> dict[str, tuple[str, ...]]:
    """The labels of each series that `/metrics` may have."""
    found: dict[str, tuple[str, ...]] = {}
    for each in Telemetry(models=["m"]).listed:
        ends = ("_bucket", "_sum", "_count") if each.kind == "histogram" else ("",)
        found |= {f"{each.shown_name}{end}": each.labels for end in ends}
    return found


def test_alarms_ask_for_metrics_that_there_are() -> None:
    texts = {block.options.get("file"): block.text for block in blocks_of(PAGE)}
    assert yaml.safe_load(texts["prometheus.yml"])["rule_files"] == ["tollgate-rules.yml"]
    (group,) = yaml.safe_load(texts["tollgate-rules.yml"])["groups"]
    asked = [each for rule in group["rules"] for each in METRIC.findall(rule["expr"])]
    assert len(group["rules"]) > 5 and len(asked) >= len(group["rules"])
    labels = known()
    for name, selected in asked:
        assert set(re.findall(r"(\w+)=", selected)) <= {*labels[name]}, name
    states = re.findall(r'state=~"([a-z|_]+)"', PAGE.read_text())
    assert states and {*"|".join(states).split("|")} <= {*map(str, states_of(State))}


def states_of(kind: object) -> list[object]:
    """The values of a Literal that names others."""
    values = [each for part in get_args(kind) for each in (get_args(part) or [part])]
    return values
