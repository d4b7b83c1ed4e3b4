"""docs/metrics.md has every metric as it is, and every metric says what it is and what to do."""

from __future__ import annotations

from collections import Counter

from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.page import page
from tests.test_tidy import ROOT

LISTED = Telemetry(models=["m"], counts_tenants=True).listed
FEW_LABELS = 3
"""Each label multiplies the series of a metric."""


def test_the_page_is_made_of_the_list() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text()
    assert written == "\n".join(page(LISTED)).rstrip() + "\n", "make fields"


def test_every_metric_of_a_worker_is_listed_once_and_described() -> None:
    telemetry = Telemetry(models=["m"], counts_tenants=True)
    made = {each.name for each in telemetry.made.histograms}
    for family in telemetry.registry.collect():
        made.add(family.name)
    listed = Counter(each.name for each in telemetry.listed)
    assert made == {*listed} and set(listed.values()) == {1}
    for each in telemetry.listed:
        assert each.text.endswith(".") and each.do.endswith(".") and len(each.labels) <= FEW_LABELS


def test_no_label_is_of_a_customer_but_where_they_are_counted() -> None:
    labels = {label for each in LISTED if each.group != "Tenants" for label in each.labels}
    assert not labels & {"org", "project", "key", "user", "tenant", "request"}
    of_tenants = {label for each in LISTED if each.group == "Tenants" for label in each.labels}
    assert of_tenants == {"org", "outcome", "kind"}
