"""A metric is added in at most three places: its entry in `gateway.telemetry`, where it is counted
or set, and, of an engine's, the field in which the engine tells it. Here are a counter, a gauge and
what engines tell already, made in a copy of the product whose workers are then asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.copied_product import copy_product, run_copy
from tests.test_tidy import ROOMS, ROOT

ENTRIES = """\
        self.observations = group.counter("observations", "Looks that workers took.", do="-")
        self.queues = group.gauge("queues", "Queues in front of upstreams.", do="-")
"""
USES = """\
        self.telemetry.observations.inc()
        self.telemetry.queues.set(sum(map(len, self.rooms.values())))
"""
OF_ENGINES = """\
    "num_steps": ("engine_steps", "Steps since the engine's start.", "-"),
"""
INSERTED = {
    "gateway/telemetry/metrics.py": {
        "        self.tasks = group.gauge(": ENTRIES,
    },
    "gateway/telemetry/engine_gauges.py": {'    "num_preemptions": (': OF_ENGINES},
    "gateway/routes/shared/services.py": {"        self.telemetry.tasks.set(": USES},
}


@pytest.mark.nightly
def test_a_metric_is_added_in_at_most_two_places(tmp_path: Path) -> None:
    assert copy_product(tmp_path, lines=INSERTED) == 3
    shared = tmp_path / "metrics"
    shared.mkdir()
    program = ("-m", "tests.gateway.telemetry.added_metrics", str(tmp_path), str(shared))
    told = run_copy(tmp_path, program, PROMETHEUS_MULTIPROC_DIR=str(shared))
    found = re.findall("^tollgate_(?:observations|queues|engine_steps).*", told.stdout, re.M)
    steps = 'tollgate_engine_steps{model="m",replica="m"} 0.0'
    one = [steps, "tollgate_observations_total 1.0", "tollgate_queues 2.0"]
    two = [steps, "tollgate_observations_total 2.0", "tollgate_queues 4.0"]
    assert [*map(sorted, (found[:3], found[3:]))] == [one, two], told.stderr or found


def test_one_folder_of_the_product_names_metrics() -> None:
    naming = {
        str(file.relative_to(ROOT))
        for room in ROOMS
        for file in (ROOT / room).rglob("*.py")
        if re.search(
            r'(\b(Counter|Gauge|Histogram)|\.(counter|gauge|histogram))\(\s*f?"', file.read_text()
        )
    }
    telemetry = "gateway/telemetry"
    names = ("metrics", "engine_gauges", "fleet_metrics", "pool_gauges")
    assert naming == {f"{telemetry}/{name}.py" for name in names}
