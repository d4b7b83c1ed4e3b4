"""What an engine says of itself becomes gauges."""

from __future__ import annotations

from engine.fake import FAKE_CONFIG, FakeCore
from gateway.telemetry import Telemetry


def test_the_size_of_an_engines_cache_is_measured() -> None:
    status = FakeCore(FAKE_CONFIG).status()
    telemetry = Telemetry(models=[status.model])
    telemetry.engine_status(status)
    line = f'tollgate_kv_cache_blocks{{model="{status.model}"}} {float(status.num_blocks)}'
    assert line in telemetry.render().decode().splitlines()
