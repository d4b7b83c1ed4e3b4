"""How long a hang-up takes to be heard, with nothing between the two ends."""

from __future__ import annotations

from bench.tools.cancel import cancel_ms
from bench.tools.load import Target
from bench.tools.ports import free_port


async def test_a_hang_up_is_heard() -> None:
    port = free_port()
    target = Target(f"http://127.0.0.1:{port}/v1", "m", None, stream=True)
    found = await cancel_ms(target, port, trials=5)
    assert 0 < found["p50"] <= found["p99"] < 1000
