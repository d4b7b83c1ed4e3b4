"""The public conformance suite before the official SDK's own everything-server, directly and
through the bridge: of both eras, of the older alone, of the newer alone.

`make mcp-conformance` unpacks the SDK and runs this; it prints how many scenarios pass each way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.sdk_server import SERVER
from tests.conformance.test_mcp_suite import SCORED, failing
from tests.conformance.world import KIT, KITTED
from tests.mcp_bridge.conftest import bridge_redis_url
from tests.mcp_bridge.processes import LEGACY, MODERN, Process, running

__all__ = ["bridge_redis_url"]

SDK = KIT.parent / "mcp-sdk"
pytestmark = [
    *KITTED,
    pytest.mark.skipif(not (SDK / SERVER).exists(), reason="make mcp-conformance unpacks the SDK"),
]
ERAS = ("both", LEGACY, MODERN)
NOT_SPOKEN = {
    LEGACY: ("tools-call-elicitation", "tools-call-sampling", "elicitation-sep"),
    MODERN: ("input-required-result-",),
}
"""Scenarios of a revision whose tools that server has for clients of this revision alone."""
Places = tuple[str, Process, Process]


@pytest.fixture(scope="module", params=ERAS)
def places(request: pytest.FixtureRequest, bridge_redis_url: str) -> Iterator[Places]:
    """Yield what a server speaks, the server, and the bridge before it."""
    era = request.param
    with running(("sdk_server", str(SDK), "--era", era), package="tests.conformance") as (server,):
        bridge = ("plain_bridge", "--redis", bridge_redis_url, "--server", server.url)
        with running(bridge) as (bridged,):
            yield era, server, bridged


@pytest.mark.parametrize("revision", [LEGACY, MODERN])
def test_the_bridge_loses_nothing_that_the_sdk_reaches(
    places: Places, revision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it, where the server speaks the revision; what it does not speak is translated."""
    era, server, bridged = places
    most = SCORED[revision]
    bridged_failures = failing(bridged.url, revision, tmp_path / "bridged")
    line = f"{revision}, a server of {era}: bridged {most - len(bridged_failures)}/{most}"
    if era in ("both", revision):
        direct_failures = failing(server.url, revision, tmp_path / "direct")
        line += f", direct {most - len(direct_failures)}/{most}"
        told = bridged_failures.keys() - direct_failures.keys()
    else:
        told = {name for name in bridged_failures if not name.startswith(NOT_SPOKEN[revision])}
    with capsys.disabled():
        print(f"\n{line} {bridged_failures or ''}")
    assert not told, {name: bridged_failures[name] for name in told}
